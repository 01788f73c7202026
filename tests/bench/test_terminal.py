"""What is shown: right at 80 columns, plain without color, nothing of an address's control characters."""

import pytest
from rich.console import Console

from kvctl.bench.collector import Collector
from kvctl.bench.figures import describe_load
from kvctl.bench.run_config import LoadConfig
from kvctl.bench.terminal import LiveView, render_result, sparkline
from tests.bench.test_outputs import full_result


def shown(renderable, width=80):
    console = Console(width=width, no_color=True, force_terminal=False)
    with console.capture() as captured:
        console.print(renderable)
    return captured.get()


@pytest.mark.parametrize("width", [80, 120])
def test_the_tables_fit_their_width(width):
    text = shown(render_result(full_result()), width)
    assert max(map(len, text.splitlines())) <= width
    assert "TTFT" in text
    assert "300 ok, 0 failed" in text
    assert "valid" in text


def test_failures_and_interruptions_are_shown_with_what_was_said():
    result = full_result()
    result["errors"] = {"http_429": {"count": 7, "first": "slow [down]\x1b[2J"}}
    result["interrupted"] = result["stopped_by_errors"] = True
    text = shown(render_result(result))
    assert "7 x http_429: slow [down]" in text
    assert "\x1b" not in text
    assert "interrupted" in text
    assert "too many errors" in text


def test_a_sparkline_rises_with_its_values():
    assert sparkline([0, 1, 2, 4]) == "▁▃▅█"
    assert sparkline([0.0, 0.0]) == "  "
    assert sparkline([]) == ""


class FakeRun:
    def __init__(self):
        self.collector = Collector()


def test_the_live_view_shows_rates_since_the_last_look():
    run, view = FakeRun(), LiveView(LoadConfig(concurrency=4, num_requests=100))
    run.collector.measured.start_s = 10.0
    view.render(run, 10.5)
    run.collector.num_ended, run.collector.output_tokens = 25, 1000.0
    run.collector.recent_ttft_s = [0.05, 0.07, 0.06]
    run.collector.measured.errors["cut"] = 3
    text = shown(view.render(run, 11.5))
    assert "25.0 req/s" in text
    assert "1,000 tok/s" in text
    assert "60.0 ms" in text
    assert "cut 3" in text


def test_loads_are_described_in_a_phrase():
    base = {"concurrency": None, "replay": False, "arrivals": None, "max_in_flight": None}
    assert describe_load(base | {"concurrency": 4}) == "closed loop, 4 at once"
    assert describe_load(base | {"replay": True}) == "trace replay"
    arrivals = {"process": "poisson", "segments": [[5, 5, None]]}
    assert describe_load(base | {"arrivals": arrivals, "max_in_flight": 9}).endswith("at most 9 in flight")
