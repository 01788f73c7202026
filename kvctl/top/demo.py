"""A server that exists only as numbers: `--demo` shows it, and tests drive it into each limit.

A step-by-step model of a continuous-batching scheduler (seats, token budget, KV blocks, preemption, an LRU prefix
cache of whole documents) that publishes the page a kvctl or vLLM server would. Deterministic: same settings, same
page. It is a picture of such a server, not a prediction; `kvctl size --simulate` is that. Floor 3.
"""

import random
from bisect import bisect_left
from collections import OrderedDict, deque
from dataclasses import dataclass, field

STEP_TOKEN_BOUNDS = (1.0, *(float(1 << power) for power in range(3, 15)))
TTFT_BOUNDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0)
ITL_BOUNDS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0)
LATENCY_BOUNDS = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0)
SIZE_BOUNDS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0, 10000.0)


@dataclass(frozen=True)
class DemoServer:
    """The server's side: its limits and its speed."""

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    kv_tokens: int = 57_344
    block_size: int = 16
    step_base_s: float = 0.012
    step_per_token_s: float = 0.00003
    step_per_seat_s: float = 0.00008
    exports_limits: bool = True  # kvctl says its maxima and reasons, vLLM does not


@dataclass(frozen=True)
class DemoLoad:
    """The clients' side. `documents` > 0: prompts cycle through so many fixed texts."""

    users: int = 8  # closed loop: as many requests at once
    prompt_tokens: int = 400
    output_tokens: int = 200
    think_s: float = 0.2
    documents: int = 0
    deferred: int = 0


@dataclass(slots=True)
class _Request:
    prompt: int
    output: int
    document: int | None
    arrived_s: float
    admitted_s: float | None = None
    first_s: float | None = None
    last_s: float = 0.0
    computed: int = 0
    cached: int = 0
    made: int = 0

    @property
    def tokens(self) -> int:
        return self.prompt + self.made


@dataclass
class _Hist:
    bounds: tuple[float, ...]
    counts: list[float] = field(default_factory=list)
    sum: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0.0] * (len(self.bounds) + 1)

    def add(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times


class DemoEngine:
    """One simulated engine. `advance` moves its clock, `page` prints what a scrape would see."""

    def __init__(self, server: DemoServer, load: DemoLoad, seed: int = 0) -> None:
        self.server = server
        self.load = load
        self.now_s = 0.0
        self.is_frozen = False
        self._rng = random.Random(seed)
        self._running: list[_Request] = []
        self._waiting: deque[_Request] = deque()
        self._arrivals: list[float] = []
        self._cache: OrderedDict[int, int] = OrderedDict()  # document -> tokens, least recently used first
        self._evicted: set[int] = set()
        self._counts: dict[str, float] = {}
        self._misses = {"new": 0.0, "evicted": 0.0, "partial_block": 0.0}
        self._hists = {
            "iteration_tokens_total": _Hist(STEP_TOKEN_BOUNDS),
            "time_to_first_token_seconds": _Hist(TTFT_BOUNDS),
            "inter_token_latency_seconds": _Hist(ITL_BOUNDS),
            "request_time_per_output_token_seconds": _Hist(ITL_BOUNDS),
            "e2e_request_latency_seconds": _Hist(LATENCY_BOUNDS),
            "request_queue_time_seconds": _Hist(LATENCY_BOUNDS),
            "request_prefill_time_seconds": _Hist(LATENCY_BOUNDS),
            "request_decode_time_seconds": _Hist(LATENCY_BOUNDS),
            "request_prompt_tokens": _Hist(SIZE_BOUNDS),
            "request_generation_tokens": _Hist(SIZE_BOUNDS),
        }
        self._step_duration = _Hist((0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0))
        self._next_document = 0
        self._reason: str | None = None

    def set_load(self, load: DemoLoad) -> None:
        """Change what the clients do from now on."""
        self.load = load

    def advance(self, seconds: float) -> None:
        """Let the server work for that long."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self._arrive()
            tokens = 0 if self.is_frozen else self._step()
            if tokens == 0:
                nearest_s = min((a for a in self._arrivals if a > self.now_s), default=end_s)
                self.now_s = min(end_s, max(self.now_s + 0.001, nearest_s))

    def _arrive(self) -> None:
        present = len(self._running) + len(self._waiting) + len(self._arrivals)
        for _ in range(self.load.users - present):
            self._arrivals.append(self.now_s + self._rng.random() * self.load.think_s)
        due = [a for a in self._arrivals if a <= self.now_s]
        self._arrivals = [a for a in self._arrivals if a > self.now_s][: max(0, self.load.users)]
        for _ in due[: max(0, self.load.users - len(self._running) - len(self._waiting))]:
            document = None
            if self.load.documents:
                document = self._next_document = (self._next_document + 1) % self.load.documents
            prompt, output = self.load.prompt_tokens, self.load.output_tokens
            if document is None:
                prompt = max(1, round(prompt * self._rng.uniform(0.6, 1.4)))
                output = max(1, round(output * self._rng.uniform(0.6, 1.4)))
            self._waiting.append(_Request(prompt, output, document, self.now_s))

    def _blocks_of(self, request: _Request) -> int:
        """Tokens of the blocks that the request holds."""
        return -(-request.tokens // self.server.block_size) * self.server.block_size

    def _held(self) -> int:
        return sum(self._blocks_of(request) for request in self._running)

    def _step(self) -> int:
        """Schedule and compute one step; returns its tokens."""
        left = self.server.max_num_batched_tokens
        plan: list[tuple[_Request, int]] = []
        held = self._held()
        for request in list(self._running):
            if request not in self._running:
                continue
            while held + 1 > self.server.kv_tokens and len(self._running) > 1:
                victim = self._running.pop()
                held -= self._blocks_of(victim)
                victim.computed, victim.cached = 0, 0
                plan = [(r, n) for r, n in plan if r is not victim]
                self._waiting.appendleft(victim)
                self._count("num_preemptions", 1)
            if request in self._running and left > 0:
                chunk = min(left, max(1, request.tokens - request.computed))
                plan.append((request, chunk))
                left -= chunk
        self._admit(plan, left)
        tokens = sum(chunk for _, chunk in plan)
        if not tokens:
            return 0
        duration = (
            self.server.step_base_s + tokens * self.server.step_per_token_s + len(plan) * self.server.step_per_seat_s
        )
        self.now_s += duration
        self._step_duration.add(duration)
        self._hists["iteration_tokens_total"].add(tokens)
        for request, chunk in plan:
            self._compute(request, chunk)
        return tokens

    def _admit(self, plan: list[tuple[_Request, int]], left: int) -> None:
        self._reason = None
        held = self._held() if self._waiting else 0
        while self._waiting:
            request = self._waiting[0]
            if left <= 0:
                self._reason = "token_budget"
            elif len(self._running) >= self.server.max_num_seqs:
                self._reason = "max_num_seqs"
            elif held + request.tokens + self.server.block_size > self.server.kv_tokens and self._running:
                self._reason = "kv_blocks"
            if self._reason or (self.load.deferred and len(self._waiting) <= self.load.deferred):
                return
            self._waiting.popleft()
            first_time = request.admitted_s is None
            request.admitted_s = self.now_s if request.admitted_s is None else request.admitted_s
            if first_time:
                self._look_up(request)
            request.computed = request.cached
            chunk = min(left, max(1, request.tokens - request.computed))
            self._running.append(request)
            held += self._blocks_of(request)
            plan.append((request, chunk))
            left -= chunk

    def _look_up(self, request: _Request) -> None:
        whole = (request.prompt - 1) // self.server.block_size * self.server.block_size
        self._count("prefix_cache_queries", request.prompt)
        self._misses["partial_block"] += request.prompt - whole
        if request.document is not None and request.document in self._cache:
            request.cached = whole
            self._cache.move_to_end(request.document)
            self._count("prefix_cache_hits", whole)
            return
        reason = "evicted" if request.document in self._evicted else "new"
        self._misses[reason] += whole
        if request.document is not None:
            self._cache[request.document] = whole
            while sum(self._cache.values()) > self.server.kv_tokens and len(self._cache) > 1:
                gone, _ = self._cache.popitem(last=False)
                self._evicted.add(gone)

    def _compute(self, request: _Request, chunk: int) -> None:
        request.computed += chunk
        if request.computed < request.tokens:
            return
        request.made += 1
        self._count("generation_tokens", 1)
        if request.first_s is None:
            request.first_s = self.now_s
            self._hists["time_to_first_token_seconds"].add(self.now_s - request.arrived_s)
            self._count("prompt_tokens", request.prompt)
            self._count("prompt_tokens_cached", request.cached)
        else:
            self._hists["inter_token_latency_seconds"].add(self.now_s - request.last_s)
        request.last_s = self.now_s
        if request.made >= request.output:
            self._running.remove(request)
            self._finish(request)

    def _finish(self, request: _Request) -> None:
        admitted_s = request.admitted_s if request.admitted_s is not None else request.arrived_s
        first_s = request.first_s if request.first_s is not None else self.now_s
        self._count("request_success", 1)
        self._hists["e2e_request_latency_seconds"].add(self.now_s - request.arrived_s)
        self._hists["request_queue_time_seconds"].add(admitted_s - request.arrived_s)
        self._hists["request_prefill_time_seconds"].add(first_s - admitted_s)
        self._hists["request_decode_time_seconds"].add(self.now_s - first_s)
        self._hists["request_time_per_output_token_seconds"].add((self.now_s - first_s) / max(1, request.made - 1))
        self._hists["request_prompt_tokens"].add(request.prompt)
        self._hists["request_generation_tokens"].add(request.made)

    def _count(self, name: str, by: float) -> None:
        self._counts[name] = self._counts.get(name, 0.0) + by

    def page(self, model: str = "demo-7b", engine: str = "0") -> str:
        """Return the metrics page of this moment."""
        base = f'engine="{engine}",model_name="{model}"'
        waiting = len(self._waiting)
        deferred = min(self.load.deferred, waiting)
        usage = min(1.0, self._held() / self.server.kv_tokens)
        blocks = self.server.kv_tokens // self.server.block_size
        lines: list[str] = []

        def put(name: str, kind: str, value: float, labels: str = "") -> None:
            lines.append(f"# TYPE {name} {kind}")
            lines.append(f"{name}{{{base}{labels}}} {value}")

        put("vllm:num_requests_running", "gauge", float(len(self._running)))
        put("vllm:num_requests_waiting", "gauge", float(waiting))
        put("vllm:kv_cache_usage_perc", "gauge", usage)
        for reason, number in (("capacity", waiting - deferred), ("deferred", deferred)):
            lines.append(f'vllm:num_requests_waiting_by_reason{{{base},reason="{reason}"}} {float(number)}')
        lines.append(
            f'vllm:cache_config_info{{{base},block_size="{self.server.block_size}",cache_dtype="auto",'
            f'enable_prefix_caching="True",gpu_memory_utilization="0.92",kv_cache_size_tokens="{self.server.kv_tokens}",'
            f'kv_cache_memory_bytes="{self.server.kv_tokens * 131072}",num_gpu_blocks="{blocks}"}} 1.0'
        )
        names = ("prompt_tokens", "prompt_tokens_cached", "generation_tokens", "num_preemptions")
        for name in (*names, "prefix_cache_queries", "prefix_cache_hits", "request_success"):
            put(f"vllm:{name}_total", "counter", self._counts.get(name, 0.0))
        for name, hist in self._hists.items():
            _put_histogram(lines, f"vllm:{name}", base, hist)
        if self.server.exports_limits:
            put("kvctl:max_num_seqs", "gauge", float(self.server.max_num_seqs))
            put("kvctl:max_num_batched_tokens", "gauge", float(self.server.max_num_batched_tokens))
            put("kvctl:max_model_len", "gauge", 8192.0)
            for reason in ("kv_blocks", "max_num_seqs", "token_budget", "preemption", "new"):
                value = float(waiting) if reason == (self._reason or "new") else 0.0
                lines.append(f'kvctl:num_requests_waiting_by_reason{{{base},reason="{reason}"}} {value}')
            for reason, tokens in self._misses.items():
                lines.append(f'kvctl:prefix_cache_miss_tokens_total{{{base},reason="{reason}"}} {tokens}')
            _put_histogram(lines, "kvctl:step_duration_seconds", base, self._step_duration)
        lines.append(f"process_cpu_seconds_total {self.now_s * 0.08:.2f}")
        lines.append("process_start_time_seconds 1.7e+09")
        return "\n".join(lines) + "\n"


def _put_histogram(lines: list[str], name: str, base: str, hist: _Hist) -> None:
    lines.append(f"# TYPE {name} histogram")
    total = 0.0
    for bound, count in zip((*map(str, hist.bounds), "+Inf"), hist.counts, strict=True):
        total += count
        lines.append(f'{name}_bucket{{{base},le="{bound}"}} {total}')
    lines.append(f"{name}_count{{{base}}} {total}")
    lines.append(f"{name}_sum{{{base}}} {hist.sum}")
