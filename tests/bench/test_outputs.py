"""Files: whole or not at all, checked beforehand, and saved elsewhere when the disk is full."""

import csv
import io
import json
from html.parser import HTMLParser
from pathlib import Path

import pytest

from kvctl.bench.html_report import render_html
from kvctl.bench.outputs import as_csv, as_json, as_vllm_json, check_writable, write_text
from kvctl.bench.result import build_result, build_summary
from kvctl.bench.run_config import ReportConfig
from kvctl.errors import ConfigError, KvctlError
from tests.bench.test_compare import result_of
from tests.bench.test_result import CLOSED, measured_of, row


def full_result(**fields):
    result = result_of(**fields)
    result["config"] |= {
        "url": "http://127.0.0.1:1",
        "date": "2026-01-02T03:04:05+00:00",
        "kvctl_version": "0",
        "notes": ["a <note>"],
    }
    result["client"] |= {
        "timing": "kernel",
        "lag_ms": {"p50": 0.1, "p99": 0.5, "n": 9},
        "coalesced_share": 0.0,
        "late": 0,
        "never_sent": 0,
        "events_per_s": 10.0,
        "cpu_us_per_event": 9.0,
        "cpu_share": 0.25,
    }
    return result


def test_a_file_that_cannot_be_written_is_told_before_the_run(tmp_path):
    check_writable(None)
    check_writable(Path("-"))
    check_writable(tmp_path / "new.json")
    assert not (tmp_path / "new.json").exists()
    with pytest.raises(ConfigError, match="cannot write"):
        check_writable(tmp_path / "no" / "new.json")
    with pytest.raises(ConfigError, match="cannot write"):
        check_writable(tmp_path)


def test_a_full_disk_loses_nothing():
    with pytest.raises(KvctlError, match="No space left") as failed:
        write_text(Path("/dev/full"), "all of it")
    saved = Path(failed.value.hint.removeprefix("It was saved as ").removesuffix("."))
    assert saved.read_text() == "all of it"
    saved.unlink()


def test_a_file_is_replaced_whole(tmp_path):
    path = tmp_path / "r.json"
    path.write_text("old")
    write_text(path, "new")
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_pipe_that_takes_a_part_at_a_time_loses_nothing(monkeypatch):
    class Reluctant(io.RawIOBase):
        taken = b""

        def writable(self):
            return True

        def write(self, data):
            self.taken += bytes(data[:1000])
            return min(len(data), 1000)

    raw = Reluctant()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(raw, write_through=True))  # as with PYTHONUNBUFFERED
    write_text(Path("-"), "ü" * 5000)
    assert raw.taken.decode() == "ü" * 5000


def test_json_has_no_numbers_that_json_does_not_have():
    with pytest.raises(ValueError, match="JSON"):
        as_json({"x": float("nan")})
    assert json.loads(as_json({"x": "ü"})) == {"x": "ü"}


def test_csv_has_one_line_per_run():
    rows = list(csv.DictReader(io.StringIO(as_csv([full_result(), full_result(factor=2.0)]))))
    assert len(rows) == 2
    assert float(rows[1]["ttft_p50_ms"]) > float(rows[0]["ttft_p50_ms"])
    assert rows[0]["ttft_n"] == "300"
    assert rows[0]["verdict"] == "valid"


# The fields that vLLM 0.32 writes and that scripts read most (serving_conventions, section 5.1).
_NAMES = (
    "date endpoint_type backend label model_id tokenizer_id num_prompts request_rate burstiness "
    "max_concurrency duration completed failed total_input_tokens total_output_tokens request_throughput "
    "request_goodput output_throughput total_token_throughput max_output_tokens_per_s "
    "max_concurrent_requests mean_ttft_ms median_ttft_ms std_ttft_ms p99_ttft_ms mean_tpot_ms "
    "median_tpot_ms p99_tpot_ms mean_itl_ms median_itl_ms p99_itl_ms mean_e2el_ms p99_e2el_ms "
)
VLLM_FIELDS = _NAMES.split()


def test_vllms_field_names_are_all_there():
    flat = as_vllm_json(full_result())
    assert set(VLLM_FIELDS) <= set(flat)
    assert flat["completed"] == 300
    assert flat["date"] == "20260102-030405"
    assert flat["request_rate"] == "inf"


class Checker(HTMLParser):
    VOID = frozenset({"meta", "line", "circle", "br"})

    def __init__(self):
        super().__init__()
        self.open, self.addresses, self.text = [], [], []

    def handle_starttag(self, tag, attributes):
        self.addresses += [value for name, value in attributes if name in ("src", "href")]
        assert tag != "script"
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def check(page):
    checker = Checker()
    checker.feed(page)
    assert checker.open == []
    assert checker.addresses == []
    assert "http://" not in page.replace("http://127.0.0.1:1", "")
    return " ".join(checker.text)


def test_the_page_of_a_run_needs_nothing_from_outside_and_escapes_what_it_shows():
    text = check(render_html(full_result(model="<img src=x>")))
    assert "<img src=x>" in text
    assert "a <note>" in text
    assert "TTFT" in text


def test_the_page_of_a_run_without_answers_is_drawn_too():
    base = full_result()
    measured = measured_of([row(0, 100.0, error="cut")])
    summary, _, latencies = build_summary(measured, CLOSED, ReportConfig())
    result = build_result(base["config"], summary, base["client"], None, measured, latencies, with_records=False)
    assert "no data" in check(render_html(result))


def test_the_page_of_a_search_shows_every_point_and_what_was_found():
    points = [{"value": float(i), "results": [full_result(factor=1 + i / 10)]} for i in (1, 2, 4)]
    search = {
        "kind": "knee",
        "parameter": "concurrency",
        "found": 2.0,
        "interrupted": False,
        "ended_at_client": False,
        "slo_share": None,
        "definitions": {"a": "b"},
        "points": points,
    }
    text = check(render_html(search))
    assert "concurrency 2" in text
