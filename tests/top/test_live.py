"""A real `kvctl serve` driven into each limit: the verdict is right within 15 s of the onset, and stays.

The same pages without kvctl's own series are what a vLLM server would say: there the limits are inferred.
"""

import itertools
import random
import re
import time

import pytest

from kvctl.metrics.server_names import Server
from kvctl.top.endpoint import parse_endpoint
from kvctl.top.monitor import Monitor
from kvctl.top.once import exit_code, watch_once
from kvctl.top.scrape import Scrape, ScrapeOptions, Scraper, SteadyClock
from kvctl.top.verdict import Limit
from tests.top.live_server import LiveServer, Load, write_model

DEADLINE_S = 15.0
INTERVAL_S = 0.5
STAYS = 4  # views in a row
_OWN = re.compile(r"^(# \w+ )?kvctl:.*\n", re.MULTILINE)


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """Three servers: a tiny KV cache, two seats, 32 tokens a step. They start side by side."""
    folder = write_model(tmp_path_factory.mktemp("live") / "model")
    tiny_kv = ("--num-gpu-blocks-override", "65", "--max-num-seqs", "64", "--max-model-len", "900")
    two_seats = ("--max-num-seqs", "2", "--kv-cache-memory-bytes", "64MiB", "--max-model-len", "2048")
    small_steps = ("--max-num-seqs", "16", "--max-num-batched-tokens", "32", "--kv-cache-memory-bytes", "128MiB")
    started = {
        "tiny_kv": LiveServer(folder, *tiny_kv, "--max-num-batched-tokens", "2048"),
        "two_seats": LiveServer(folder, *two_seats),
        "small_steps": LiveServer(folder, *small_steps, "--max-model-len", "4096"),
    }
    try:
        for server in started.values():
            server.wait(90)
        yield started
    finally:
        for server in started.values():
            server.stop()


class Watcher:
    """Two monitors over the same scrapes: the page as it is, and without kvctl's own series."""

    def __init__(self, port):
        self._clock = SteadyClock()
        endpoint = parse_endpoint(f"127.0.0.1:{port}")
        self._scraper = Scraper(endpoint, ScrapeOptions({}, timeout_s=10), self._clock)
        self._full = Monitor({endpoint.url: endpoint.label}, INTERVAL_S)
        self._as_vllm = Monitor({endpoint.url: endpoint.label}, INTERVAL_S)

    def look(self):
        """One scrape, both views."""
        scrape = self._scraper.scrape()
        assert scrape.text is not None, scrape.error
        stripped = Scrape(scrape.url, scrape.at_s, _OWN.sub("", scrape.text), None)
        views = []
        for monitor, one in ((self._full, scrape), (self._as_vllm, stripped)):
            monitor.add(one)
            views += monitor.view(self._clock(), 5.0).engines
        return views

    def close(self):
        self._scraper.close()

    def watch(self, wanted, wanted_as_vllm):
        """Seconds until both verdicts are as wanted and stay; fails at the deadline."""
        began = time.monotonic()
        right_since, seen = None, []
        while True:
            full, as_vllm = self.look()
            passed_s = time.monotonic() - began
            seen.append((round(passed_s, 1), full.verdict.limit.value, as_vllm.verdict.limit.value))
            if full.verdict.limit is wanted and as_vllm.verdict.limit in wanted_as_vllm:
                right_since = passed_s if right_since is None else right_since
                if len([s for s in seen if s[0] >= round(right_since, 1)]) >= STAYS:
                    return right_since, full, as_vllm
            else:
                right_since = None
            assert passed_s < DEADLINE_S + STAYS * INTERVAL_S, seen
            assert right_since is not None or passed_s < DEADLINE_S, seen
            time.sleep(INTERVAL_S)


def noise(num_tokens):
    """Prompts of random tokens, a different stream for each client."""

    def make(client):
        rng = random.Random(client)
        while True:
            yield [rng.randrange(3, 250) for _ in range(num_tokens)]

    return make


def documents(num_tokens, num):
    """The same documents round and round."""
    texts = [[random.Random(1000 + i).randrange(3, 250) for _ in range(num_tokens)] for i in range(num)]
    return lambda _client: itertools.cycle(texts)


SCENARIOS = {
    "cyclic-documents": (
        "tiny_kv",
        lambda port: Load(port, 1, documents(300, 5), 4),
        Limit.PREFIX_THRASH,
        {Limit.PREFIX_THRASH, Limit.PREFIX_TOO_SHORT},  # vLLM does not say why tokens were not found
    ),
    "tiny-kv": ("tiny_kv", lambda port: Load(port, 10, noise(150), 300), Limit.KV_BLOCKS, {Limit.KV_BLOCKS}),
    "two-seats": ("two_seats", lambda port: Load(port, 10, noise(100), 100), Limit.MAX_NUM_SEQS, {Limit.MAX_NUM_SEQS}),
    "small-steps": (
        "small_steps",
        lambda port: Load(port, 12, noise(1500), 2),
        Limit.TOKEN_BUDGET,
        {Limit.TOKEN_BUDGET},
    ),
}


@pytest.mark.parametrize("name", list(SCENARIOS))
def test_a_server_driven_into_a_limit_is_told_so_within_15_s(servers, name, record_property):
    which, make_load, wanted, wanted_as_vllm = SCENARIOS[name]
    server = servers[which]
    watcher = Watcher(server.port)
    try:
        watcher.watch(Limit.IDLE, {Limit.IDLE})  # nobody asks yet
        with make_load(server.port) as load:
            delay_s, full, as_vllm = watcher.watch(wanted, wanted_as_vllm)
            once = watch_once([parse_endpoint(f"127.0.0.1:{server.port}")], ScrapeOptions({}), 1.0)
        assert load.errors == []
        assert load.num_done > 0 or name == "tiny-kv"
        assert full.snapshot.server is Server.KVCTL
        assert as_vllm.snapshot.server is Server.VLLM
        assert full.verdict.finding.advice
        assert once.engines[0].verdict.limit is wanted  # two scrapes a second apart are enough
        assert exit_code(once) == 10
        record_property("delay_s", round(delay_s, 1))
        print(f"\n{name}: {wanted.value} after {delay_s:.1f} s: {full.verdict.finding.summary}")
    finally:
        watcher.close()


def test_a_server_that_keeps_up_is_healthy_and_idle_again_afterwards(servers):
    watcher = Watcher(servers["two_seats"].port)
    try:
        with Load(servers["two_seats"].port, 1, noise(100), 100) as load:
            watcher.watch(Limit.HEALTHY, {Limit.HEALTHY, Limit.PREFIX_TOO_SHORT})
        assert load.errors == []
        watcher.watch(Limit.IDLE, {Limit.IDLE})
    finally:
        watcher.close()
