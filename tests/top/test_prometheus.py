"""Rates and quantiles against a real Prometheus that scrapes the same pages: equal within 1 %, across a restart too."""

import math
import time
from itertools import pairwise

import pytest

from kvctl.metrics.server_names import Counter, Timing
from kvctl.top.demo import DemoEngine, DemoLoad, DemoServer
from kvctl.top.window import measure
from tests.top.page_server import PageServer, page
from tests.top.prometheus_server import Prometheus, find_prometheus
from tests.top.series import read

WINDOW_S = 5
COUNTERS = {
    Counter.GENERATION_TOKENS: "vllm:generation_tokens_total",
    Counter.PROMPT_TOKENS: "vllm:prompt_tokens_total",
    Counter.PREFIX_QUERIES: "vllm:prefix_cache_queries_total",
    Counter.FINISHED: "vllm:request_success_total",
}
TIMINGS = {
    Timing.TTFT: "vllm:time_to_first_token_seconds",
    Timing.ITL: "vllm:inter_token_latency_seconds",
    Timing.E2E: "vllm:e2e_request_latency_seconds",
    Timing.STEP_TOKENS: "vllm:iteration_tokens_total",
}
QUANTILES = (0.01, 0.25, 0.5, 0.9, 0.99, 1.0)


class Pages:
    """A new page at every scrape, numbered; at one of them the server has been restarted."""

    def __init__(self, restart_at):
        self.pages = []
        self._restart_at = restart_at
        self._engine = self._start(60.0)

    def _start(self, warm_up_s):
        engine = DemoEngine(DemoServer(max_num_seqs=8), DemoLoad(users=24, output_tokens=40))
        engine.advance(warm_up_s)
        return engine

    def __call__(self):
        if len(self.pages) == self._restart_at:
            self._engine = self._start(3.0)
        self._engine.advance(0.25)
        text = self._engine.page() + f"test_page_number {len(self.pages)}\n"
        self.pages.append(text)
        return text


@pytest.fixture(scope="module", params=[None, 24], ids=["steady", "restarted"])
def scraped(request, tmp_path_factory):
    """The server, the pages it saw, and a moment whose window it has filled."""
    program = find_prometheus()
    if program is None:
        pytest.skip("Prometheus is neither installed nor to be had from the package index")
    pages = Pages(request.param)
    with PageServer({"/metrics": page(pages)}) as target:
        folder = tmp_path_factory.mktemp("prometheus")
        prometheus = Prometheus(program, folder, f"127.0.0.1:{target.port}", "250ms")
        try:
            prometheus.wait()
            deadline = time.monotonic() + 15
            while len(pages.pages) < 30 and time.monotonic() < deadline:
                time.sleep(0.1)
            time.sleep(0.3)
            (numbers,) = prometheus.query("test_page_number[1h]")
            yield prometheus, pages.pages, [(float(at), int(float(n))) for at, n in numbers["values"]]
        finally:
            prometheus.close()


@pytest.fixture(scope="module")
def compared(scraped):
    """Prometheus, the moment, and our window over the samples that it used."""
    prometheus, pages, samples = scraped
    at_s = samples[-1][0] + 0.05
    used = [(at, number) for at, number in samples if at_s - WINDOW_S < at <= at_s]
    assert len(used) >= 15
    readings = [read(pages[number], at) for at, number in used]
    return prometheus, at_s, measure(readings)


def number_of(result):
    (one,) = result
    return float(one["value"][1])


@pytest.mark.parametrize("counter", list(COUNTERS))
def test_rates_are_prometheus_rates(compared, counter):
    prometheus, at_s, window = compared
    theirs = number_of(prometheus.query(f"rate({COUNTERS[counter]}[{WINDOW_S}s])", at_s))
    assert theirs > 0
    assert window.rate(counter) == pytest.approx(theirs, rel=0.01)


@pytest.mark.parametrize("timing", list(TIMINGS))
@pytest.mark.parametrize("q", QUANTILES)
def test_quantiles_are_prometheus_histogram_quantiles(compared, timing, q):
    prometheus, at_s, window = compared
    if window.num_restarts and q < 0.25:
        # Prometheus sees a restart bucket by bucket, and misses it in the lowest ones, whose few observations the
        # new process has already overtaken. We see that the process is another.
        q = 0.25
    expression = f"histogram_quantile({q}, rate({TIMINGS[timing]}_bucket[{WINDOW_S}s]))"
    theirs = number_of(prometheus.query(expression, at_s))
    ours = window.timings[timing].quantile(q)
    assert ours.value == pytest.approx(theirs, rel=0.01)
    assert ours.low <= theirs * 1.000001
    assert theirs <= ours.high * 1.000001


@pytest.mark.parametrize("timing", list(TIMINGS))
def test_means_are_the_quotient_of_prometheus_rates(compared, timing):
    prometheus, at_s, window = compared
    name = TIMINGS[timing]
    expression = f"rate({name}_sum[{WINDOW_S}s]) / rate({name}_count[{WINDOW_S}s])"
    assert window.timings[timing].mean == pytest.approx(number_of(prometheus.query(expression, at_s)), rel=0.01)


def test_where_prometheus_has_nan_we_have_nothing(compared):
    prometheus, at_s, window = compared
    expression = f"histogram_quantile(1.5 - 1, 0 * rate({TIMINGS[Timing.TTFT]}_bucket[{WINDOW_S}s]))"
    assert math.isnan(number_of(prometheus.query(expression, at_s)))
    empty = window.timings[Timing.TTFT].since(window.timings[Timing.TTFT])
    assert empty.quantile(0.5) is None


def test_a_restart_is_seen_where_there_was_one(scraped, compared):
    _, pages, _ = scraped
    totals = [read(text).counters[Counter.GENERATION_TOKENS] for text in pages]
    fell = any(b < a for a, b in pairwise(totals))
    assert compared[2].num_restarts == (1 if fell else 0)
