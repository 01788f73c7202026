"""Options that exclude or need one another, and what they become."""

import math
from base64 import b64encode

import pytest

from kvctl.bench.settings import BenchOptions, make_config, normal_url
from kvctl.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("localhost:8000", "http://localhost:8000"),
        ("http://h:1/v1/", "http://h:1"),
        ("https://api.example/openai/v1", "https://api.example/openai"),
        ("http://[::1]:8000", "http://[::1]:8000"),
    ],
)
def test_addresses_are_taken_as_people_write_them(text, url):
    assert normal_url(text) == url


@pytest.mark.parametrize("text", ["", "http://", "ftp://h", "http://h:x", "http://h:99999", "http://h:0"])
def test_what_is_no_address_is_refused(text):
    with pytest.raises(ConfigError):
        normal_url(text)


def test_without_options_sixteen_streams_run_for_thirty_seconds():
    load = make_config(BenchOptions()).load
    assert (load.concurrency, load.duration_s, load.num_requests) == (16, 30.0, None)


def test_each_run_has_another_seed_unless_one_is_given():
    assert make_config(BenchOptions(seed=5)).load.seed == 5
    assert len({make_config(BenchOptions()).load.seed for _ in range(20)}) > 10


def test_a_rate_that_ends_ends_the_run():
    assert make_config(BenchOptions(rate="1@10s,5@20s")).load.duration_s == 30.0
    assert make_config(BenchOptions(rate="1@10s,5@20s", requests=7)).load.duration_s is None
    assert make_config(BenchOptions(rate="5@1s,0@1s,...")).load.duration_s == 30.0


def test_burstiness_makes_the_process_gamma():
    arrivals = make_config(BenchOptions(rate="3", burstiness=0.5)).load.arrivals
    assert (arrivals.process, arrivals.burstiness) == ("gamma", 0.5)


def test_a_timed_dataset_is_replayed_and_an_untimed_one_runs_in_a_closed_loop(tmp_path):
    timed, plain = tmp_path / "t.jsonl", tmp_path / "p.jsonl"
    timed.write_text('{"prompt": "a", "timestamp": 1}\n{"prompt": "b", "timestamp": 2}\n')
    plain.write_text('{"prompt": "a"}\n')
    config = make_config(BenchOptions(dataset=timed, speedup=2.0))
    assert config.load.replay
    assert [entry.due_s for entry in config.workload.dataset.entries] == [0.0, 0.5]
    assert make_config(BenchOptions(dataset=plain)).load.concurrency == 16
    assert make_config(BenchOptions(dataset=timed, concurrency=3)).load.concurrency == 3
    assert (
        make_config(BenchOptions(dataset=plain, output_tokens="9")).workload.dataset.entries[0].turns[0].output_tokens
        == 9
    )


@pytest.mark.parametrize(
    "options",
    [
        {"concurrency": 2, "rate": "3"},
        {"concurrency": 0},
        {"concurrency": 4, "is_search": True},
        {"concurrency": 2, "max_in_flight": 3},
        {"rate": "1", "max_in_flight": 0},
        {"arrivals": "often"},
        {"duration": "0s"},
        {"duration": "soon"},
        {"requests": 0},
        {"warmup": -1},
        {"workers": 0},
        {"timeout": "0"},
        {"max_error_rate": 1.5},
        {"max_error_rate": math.nan},
        {"workload": "chat", "input_tokens": "5"},
        {"workload": "nothing"},
        {"speedup": 2.0},
        {"shared_prefix": "0x5"},
        {"shared_prefix": "ax5"},
        {"endpoint": "embeddings"},
        {"extra_body": "[1]"},
        {"extra_body": "{"},
        {"header": ["no colon"]},
        {"header": ["A: b\r\nC: d"]},
        {"header": ["Ä: b"]},
        {"slo": "fast"},
        {"rate": "0"},
        {"input_tokens": "0"},
        {"think": "long"},
        {"ramp": "x"},
        {"gpu": "no such card"},
        {"gpu": "l4", "num_gpus": 0},
    ],
)
def test_impossible_options_are_refused(options):
    with pytest.raises(ConfigError):
        make_config(BenchOptions(**options))


def test_the_body_carries_what_was_asked_for():
    config = make_config(
        BenchOptions(extra_body='{"top_p": 0.5}', respect_eos=True, temperature=None, header=["X-A: b"], api_key="k")
    )
    options = config.request.options()
    assert options["top_p"] == 0.5
    assert "ignore_eos" not in options
    assert "temperature" not in options
    assert config.headers == {"X-A": "b", "Authorization": "Bearer k"}


def test_a_name_and_password_become_a_header_and_leave_the_address():
    config = make_config(BenchOptions(url="http://me:s%40cret@h:1/v1"))
    assert config.url == "http://h:1"
    assert config.headers == {"Authorization": "Basic " + b64encode(b"me:s@cret").decode()}


def test_arrivals_of_a_rate_that_a_search_sets_are_kept():
    load = make_config(BenchOptions(arrivals="constant", is_search=True)).load
    assert load.process == "constant"
    assert make_config(BenchOptions(burstiness=0.5, is_search=True)).load.process == "gamma"


def test_a_shared_prefix_is_groups_by_tokens():
    kind = make_config(BenchOptions(shared_prefix="8x512", turns="2..4")).workload.profile.classes[0]
    assert (kind.prefix_groups, kind.prefix_tokens, kind.turns.high) == (8, 512, 4)
    assert make_config(BenchOptions(shared_prefix="300")).workload.profile.classes[0].prefix_groups == 1
