"""The page reader, against prometheus_client's own parser and against pages made to break it."""

import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kvctl.metrics.exposition import parse_page, printable
from kvctl.metrics.server_names import Server, detect_server

SCRAPE = Path(__file__).parents[1] / "data" / "top" / "vllm_under_load_1.txt"
LABEL_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


def theirs(text):
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def ours(text):
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for samples in parse_page(text).series.values()
        for sample in samples
    }


def test_a_real_scrape_reads_as_prometheus_client_reads_it():
    text = SCRAPE.read_text()
    page = parse_page(text)
    assert page.num_rejected == 0
    assert ours(text) == theirs(text)
    assert page.num_series == len(theirs(text))
    assert page.kinds["vllm:num_requests_running"] == "gauge"
    assert page.family_of("vllm:time_to_first_token_seconds_bucket") == "vllm:time_to_first_token_seconds"
    assert page.label("vllm:cache_config_info", "kv_cache_size_tokens") == "93184"


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(LABEL_TEXT, st.floats(allow_nan=False), max_size=4),
    st.lists(st.floats(0, 100), max_size=6),
)
def test_any_label_value_survives_the_trip_through_prometheus_clients_writer(gauges, observations):
    registry = CollectorRegistry()
    gauge = Gauge("g", "help with \\ and \n newline", ["label"], registry=registry)
    for label, value in gauges.items():
        gauge.labels(label=label).set(value)
    histogram = Histogram("h", "seconds", registry=registry)
    Counter("c", "count", registry=registry).inc(3)
    for value in observations:
        histogram.observe(value)
    page = parse_page(generate_latest(registry))
    assert page.num_rejected == 0
    assert {s.labels["label"]: s.value for s in page.samples("g")} == gauges
    assert page.value("c_total") == 3
    read = page.histogram("h")
    assert read is not None
    assert read.count == len(observations)
    assert read.bounds == (*Histogram.DEFAULT_BUCKETS[:-1], math.inf)


def test_numbers_timestamps_exemplars_and_quoted_names_are_read():
    page = parse_page(
        'a 1\na2{} +Inf\na3 -Inf\na4 NaN\nb{x="1",} 2e3 1700000000000\n'
        'c_bucket{le="1"} 4 # {trace_id="}{"} 0.5 1700000000.5\n'
        '{"my.metric",x="y"} 7\n'
        'd{x="# } \\" \\\\ \\n"} 8\r\n'
        "e 1 1700000000.250\n# EOF\n"
    )
    assert page.num_rejected == 0
    assert page.value("a") == 1
    assert page.value("a2") is None  # not a finite number: missing, never 0
    assert page.series["a2"][0].value == math.inf
    assert math.isnan(page.series["a4"][0].value)
    assert page.series["b"][0].timestamp_ms == 1_700_000_000_000
    assert page.series["e"][0].timestamp_ms == 1_700_000_000_250
    assert page.value("c_bucket", le="1") == 4
    assert page.value("my.metric", x="y") == 7
    assert page.series["d"][0].labels == {"x": '# } " \\ \n'}


@pytest.mark.parametrize(
    "line",
    [
        "<html><body>404</body></html>",
        "a{x=1} 2",
        'a{x="1"',
        'a{x="1} 2',
        "a",
        "a one",
        "a 0x10",
        "a 1_000",
        "{} 3",
        'a{x="1"y="2"} 3',
        "\x1b[2J\x1b[31mred 1",
        "a" * 70_000 + " 1",
    ],
)
def test_a_line_that_is_no_sample_is_counted_and_the_rest_is_read(line):
    page = parse_page(f"before 1\n{line}\nafter 2\n")
    assert (page.value("before"), page.value("after")) == (1, 2)
    assert page.num_series == 2
    assert page.num_rejected == 1
    assert page.rejected[0].number == 2
    assert "\x1b" not in page.rejected[0].start


def test_a_series_that_comes_twice_is_counted_once():
    page = parse_page('a{x="1"} 5\na{x="1"} 5\na{x="2"} 1\n')
    assert page.value("a") == 6
    assert page.num_rejected == 1


def test_a_type_line_that_lies_does_not_change_the_numbers():
    page = parse_page("# TYPE a histogram\n# TYPE a gauge\n# TYPE b nonsense\na 3\nb 4\n")
    assert page.kinds == {"a": "histogram"}
    assert page.value("a") == 3
    assert page.histogram("a") is None


@pytest.mark.parametrize(
    "page",
    [
        "a{" + 'x="1",' * 10_000,
        'a{b="' + "\\" * 60_001,
        '"' * 65_000,
        "a{" * 30_000,
        "a " + "1 " * 30_000,
        "a " + "9" * 60_000 + "e" * 100,
        "# TYPE " + "x " * 30_000,
        "\0" * 65_000,
    ],
)
def test_a_hostile_line_is_refused_and_not_searched_forever(page):
    assert parse_page(page).num_series == 0


def test_an_endless_page_is_cut_off_and_says_so():
    page = parse_page("a 1\n" * 10 + "".join(f"b{i} 1\n" for i in range(100)), max_series=50)
    assert page.num_series == 50
    assert "50 series" in page.truncated
    assert "bytes" in parse_page("a 1\n" * 100, max_bytes=100).truncated
    assert "lines" in parse_page("\n" * 1000, max_series=50).truncated
    assert "no samples" in parse_page("nonsense\n" * 30_000).truncated


def test_a_page_longer_than_a_piece_is_read_whole_and_in_order():
    text = "".join(f'metric{{number="{i}",padding="{"x" * 90}"}} {i}\n' for i in range(20_000))
    page = parse_page(text)
    assert len(text) > 2 << 20
    assert [sample.value for sample in page.series["metric"]] == list(range(20_000))
    assert page.num_rejected == 0
    assert parse_page("no sample\n" * 3).rejected[-1].number == 3


def test_bytes_that_are_no_text_are_read_as_far_as_they_go():
    page = parse_page(b'a{x="\xff\xfe"} 1\nb 2\n')
    assert page.value("b") == 2
    assert page.series["a"][0].labels["x"] == "��"


def test_only_wanted_prefixes_are_read_when_asked():
    page = parse_page("vllm:a 1\npython_gc 2\n", prefixes=("vllm:",))
    assert set(page.series) == {"vllm:a"}


def test_printable_takes_the_terminals_tricks_away():
    assert printable("ok") == "ok"
    assert printable("\x1b]0;title\x07\x9b31m\u202eevil\u2066") == "�]0;title��31m�evil�"
    assert printable("x" * 300, limit=10) == "x" * 9 + "…"


@pytest.mark.parametrize(
    ("text", "server"),
    [
        ("vllm:num_requests_running 1\nkvctl:max_num_seqs 2", Server.KVCTL),
        ("vllm:num_requests_running 1", Server.VLLM),
        ("sglang:num_running_reqs 1", Server.SGLANG),
        ("sglang_num_running_reqs 1", Server.SGLANG),
        ("tgi_queue_size 1", Server.TGI),
        ("llamacpp:requests_processing 1", Server.LLAMA_CPP),
        ("trtllm_num_requests_running 1", Server.TRTLLM),
        ("node_load1 1", Server.UNKNOWN),
        ("", Server.UNKNOWN),
    ],
)
def test_the_kind_of_server_is_told_from_its_names(text, server):
    assert detect_server(parse_page(text)) == server


@pytest.mark.parametrize("as_bytes", [False, True])
def test_a_page_that_is_too_long_ends_at_a_whole_line(as_bytes):
    """Cut in the middle, 123456 would be read as 1234."""
    text = "a 1\nb 123456\nc 3\n"
    for limit in range(len(text)):
        page = parse_page(text.encode() if as_bytes else text, max_bytes=limit)
        assert page.truncated and page.value("b") in (None, 123456) and not page.num_rejected
    assert parse_page(text, max_bytes=len(text)).truncated is None
