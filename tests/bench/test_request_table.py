"""Latencies of a request, from moments; and that rows come back as they went in."""

import pickle
from dataclasses import replace

import pytest

from kvctl.bench import request_table
from kvctl.bench.request_table import RequestRow, RequestTable

ROW = RequestRow(
    number=3,
    class_name="chat",
    error_kind="",
    due_s=100.0,
    sent_s=100.5,
    first_s=100.55,
    first_answer_s=100.71,
    last_s=100.86,
    end_s=100.87,
    connect_s=0.25,
    place_wait_s=0.0,
    max_gap_s=0.125,
    output_tokens=32,
    first_event_tokens=1,
    num_events=32,
    prompt_tokens=-1,
    cached_tokens=-1,
    asked_prompt_tokens=512,
    asked_output_tokens=32,
    reasoning_events=16,
    coalesced_events=0,
)


def test_latencies_start_when_sent_and_ttft_also_when_due():
    found = ROW.latencies_s()
    assert found["ttft"] == pytest.approx(0.050)
    assert found["ttft_due"] == pytest.approx(0.550)
    assert found["ttfo"] == pytest.approx(0.210)
    assert found["tpot"] == pytest.approx(0.010)
    assert found["e2e"] == pytest.approx(0.360)


def test_four_tokens_per_event_still_give_ten_milliseconds_each():
    row = replace(ROW, num_events=8, first_event_tokens=4, last_s=100.55 + 0.280)
    assert row.latencies_s()["tpot"] == pytest.approx(0.010)


def test_one_event_has_no_tpot_and_no_gap():
    found = replace(ROW, num_events=1, output_tokens=1, last_s=ROW.first_s).latencies_s()
    assert (found["tpot"], found["max_gap"]) == (None, None)


def test_what_never_came_is_none():
    found = replace(ROW, first_s=0.0, last_s=0.0, first_answer_s=0.0, num_events=0).latencies_s()
    assert set(found.values()) == {None}


def test_rows_come_back_as_they_went_in():
    table, other = RequestTable(), RequestTable()
    rows = [ROW, replace(ROW, number=4, error_kind="cut", class_name="rag"), replace(ROW, prompt_tokens=77)]
    table.append(rows[0])
    for row in rows[1:]:
        other.append(row)
    table.merge(other)
    assert list(table.rows()) == rows
    assert len(table) == 3


def test_tens_of_thousands_of_rows_take_no_memory_and_survive_a_trip_to_another_process():
    table = RequestTable()
    for i in range(20_001):
        table.append(replace(ROW, number=i))
    assert len(table._records) < 200 * 8192
    assert table._in_memory == []
    copy = pickle.loads(pickle.dumps(table))
    for one in (table, copy):
        assert len(one) == 20_001
        assert [row.number for row in one.rows()] == list(range(20_001))
    copy.append(ROW)
    assert list(copy.rows())[-1] == ROW


def test_without_a_place_for_a_file_the_rows_stay_in_memory(monkeypatch):
    def full(**_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(request_table.tempfile, "TemporaryFile", full)
    table = RequestTable()
    for i in range(20_000):
        table.append(replace(ROW, number=i))
    assert [row.number for row in table.rows()] == list(range(20_000))
