"""The limits without a queue at the scheduler: decode bandwidth, the prefix cache, the frontend; and none at all.

Pure, same shape as `limits_queue`. Floor 3.
"""

from collections.abc import Sequence
from statistics import median

from kvctl.top import remedies
from kvctl.top.case import Case, Point
from kvctl.top.limits_queue import Rule
from kvctl.top.verdict import Evidence, Finding, Limit
from kvctl.units import format_count, format_seconds

_CORE_FULL = 0.9  # of one CPU core: a Python process does not get more
_LOW_HITS = 0.3
_MIN_POINTS = 6


def decode_bandwidth(case: Case) -> Finding | None:
    """Tokens/s no longer rises with the running requests; each further one slows the others."""
    if case.is_queueing or case.running_mean < 2 or case.is_kv_tight:
        return None
    if case.prefill_share is not None and case.prefill_share > 0.5:
        return None
    grown = _batch_gain(case.history)
    if grown is None:
        return None
    few, many = grown
    gain, slower = many[1] / few[1], many[2] / few[2]
    batch = many[0] / few[0]
    if gain > 1 + 0.25 * (batch - 1) or slower < 1.3 or case.running_mean < (few[0] + many[0]) / 2:
        return None
    evidence = (
        Evidence(
            f"{few[0]:.3g} -> {many[0]:.3g} running requests brought {few[1]:.4g} -> {many[1]:.4g} tokens/s",
            "generation_gain",
            gain,
        ),
        Evidence(f"and {format_seconds(few[2])} -> {format_seconds(many[2])} between two tokens", "itl_ratio", slower),
        Evidence(f"{case.waiting_mean:.3g} wait", "waiting", case.waiting_mean),
    )
    summary = (
        f"Decode bound: {batch:.1f} times the requests bring {gain:.2f} times the tokens/s; "
        f"each token takes {slower:.1f} times as long."
    )
    return Finding(
        Limit.DECODE_BANDWIDTH, 0.8 if gain < 1.15 else 0.65, summary, evidence, remedies.faster_decode(case)
    )


def _batch_gain(history: Sequence[Point]) -> tuple[tuple[float, float, float], tuple[float, float, float]] | None:
    """(running, tokens/s, seconds between tokens) at few and at many running requests; None without a contrast."""
    points = [
        (p.running, p.generation_tokens_per_s, p.itl_mean_s)
        for p in history
        if p.running and p.running >= 1 and p.generation_tokens_per_s and p.itl_mean_s and not p.waiting
    ]
    if len(points) < _MIN_POINTS:
        return None
    points.sort()
    third = len(points) // 3
    few, many = points[:third], points[-third:]
    if many[0][0] < 1.5 * few[-1][0]:
        return None
    return _middle(few), _middle(many)


def _middle(points: Sequence[tuple[float, float, float]]) -> tuple[float, float, float]:
    return median(p[0] for p in points), median(p[1] for p in points), median(p[2] for p in points)


def prefix_thrash(case: Case) -> Finding | None:
    """Prompts begin like earlier ones, but their blocks were evicted in between."""
    now = case.now
    rate, queries = now.prefix_hit_rate, now.prefix_queries
    if rate is None or not queries:
        return None
    evicted = case.miss_share("evicted")
    if evicted is not None:
        if evicted < 0.3 or rate > 0.7:
            return None
        confidence = 0.92 if evicted >= 0.5 else 0.7
    else:
        inferred = _thrash_inferred(case, rate)
        if inferred is None:
            return None
        confidence = inferred
    evidence = [
        Evidence(f"{rate:.0%} of {format_count(queries)} looked-up tokens were found", "prefix_hit_rate", rate),
    ]
    if evicted is not None:
        evidence.append(Evidence(f"{evicted:.0%} of the missed tokens had been evicted", "evicted_share", evicted))
    before = _best_before(case)
    if before is not None and before > rate:
        evidence.append(Evidence(f"{before:.0%} were found earlier", "prefix_hit_rate_before", before))
    if now.written_tokens is not None and now.kv_capacity_tokens:
        times = now.written_tokens / now.kv_capacity_tokens
        evidence.append(
            Evidence(
                f"the cache of {format_count(now.kv_capacity_tokens)} tokens has been written over {times:.1f} times",
                "cache_turnover",
                times,
            )
        )
    idle, gap = now.block_idle_before_evict_s, now.block_reuse_gap_s
    if idle is not None and idle.mean is not None:
        evidence.append(
            Evidence(f"a block is idle {format_seconds(idle.mean)} before it goes", "idle_before_evict_s", idle.mean)
        )
    if gap is not None and gap.mean is not None:
        evidence.append(Evidence(f"a block comes back after {format_seconds(gap.mean)}", "block_reuse_gap_s", gap.mean))
    of_cache = f" of {format_count(now.kv_capacity_tokens)} tokens" if now.kv_capacity_tokens else ""
    summary = f"Prefix cache thrashes: {rate:.0%} found, what comes back was evicted from the cache{of_cache}."
    return Finding(Limit.PREFIX_THRASH, confidence, summary, tuple(evidence), remedies.keep_prefixes(case))


def _thrash_inferred(case: Case, rate: float) -> float | None:
    """Confidence where the server does not say why tokens were missed; None: no sign of thrash."""
    now = case.now
    turned_over = (
        now.written_tokens is not None
        and now.kv_capacity_tokens is not None
        and now.written_tokens >= now.kv_capacity_tokens
    )
    if rate > _LOW_HITS or not (turned_over or (case.kv_mean or 0) >= 0.9):
        return None
    idle, gap, before = now.block_idle_before_evict_s, now.block_reuse_gap_s, _best_before(case)
    if idle is not None and gap is not None and idle.mean is not None and gap.mean is not None and gap.mean > idle.mean:
        return 0.85
    if before is None or before < 0.2 or rate > before / 2 or not _same_prompts(case):
        return None
    return 0.7 if _was_better_lately(case, before) else 0.55


def _same_prompts(case: Case) -> bool:
    """Whether the window's prompts are as long as those before: other prompts may simply share nothing."""
    mean, size, block = case.prompt_tokens_mean, case.now.request_size, case.now.settings.block_size
    if mean is None or size is None or (block is not None and mean < 2 * block):
        return False
    return size.prompt_tokens > 0 and 0.7 <= mean / size.prompt_tokens <= 1.4


def _was_better_lately(case: Case, best: float) -> bool:
    """Whether this session itself has seen the better hit rate, over more than a lucky interval."""
    return sum(1 for p in case.history if p.prefix_hit_rate is not None and p.prefix_hit_rate >= best * 0.7) >= 3


def _best_before(case: Case) -> float | None:
    """The best hit rate seen before: over the server's life up to the window, or in an interval of the session."""
    rates = [point.prefix_hit_rate for point in case.history if point.prefix_hit_rate is not None]
    rates += [case.now.prefix_hit_rate_before] if case.now.prefix_hit_rate_before is not None else []
    return max(rates, default=None)


def prefix_too_short(case: Case) -> Finding | None:
    """The prefix cache is asked and finds nothing, ever."""
    now = case.now
    if not now.prefix_queries or now.prefix_hit_rate or now.prefix_hit_rate_before:
        return None
    if case.requests_seen < 3 and now.prefix_queries < 1000:
        return None
    partial, disabled = case.miss_share("partial_block"), case.miss_share("disabled")
    block = now.settings.block_size
    prompt = case.prompt_tokens_mean
    short = block is not None and prompt is not None and prompt < 2 * block
    if disabled is not None and disabled > 0.5:
        confidence, why = 0.8, "prefix caching is off"
    elif partial is not None and partial >= 0.5:
        confidence, why = 0.8, f"{partial:.0%} of the tokens fill no whole block"
    elif partial is not None:
        confidence, why = 0.4, "the prompts begin differently"
    elif short:
        confidence, why = 0.75, f"a prompt of {prompt:.0f} tokens has at most one whole block of {block}"
    else:
        confidence, why = 0.5, "the prompts share no whole block, or it was evicted; the page does not say which"
    evidence = [
        Evidence(f"0 of {format_count(now.prefix_queries)} looked-up tokens were found", "prefix_hit_rate", 0.0),
        Evidence(why, "why", partial),
    ]
    if block is not None:
        evidence.append(Evidence(f"a block has {block} tokens", "block_size", float(block)))
    if prompt is not None:
        evidence.append(Evidence(f"a prompt has {format_count(prompt)} on average", "prompt_tokens_mean", prompt))
    if partial is None and now.written_tokens and now.kv_capacity_tokens:
        times = now.written_tokens / now.kv_capacity_tokens
        if times >= 1:
            text = f"the cache has been written over {times:.1f} times: what would match may be gone"
            evidence.append(Evidence(text, "cache_turnover", times))
    summary = f"Prefix cache finds nothing: 0 of {format_count(now.prefix_queries)} tokens; {why}."
    return Finding(Limit.PREFIX_TOO_SHORT, confidence, summary, tuple(evidence), remedies.share_more(case))


def frontend(case: Case) -> Finding | None:
    """The engine waits for nobody, yet the API process is at its core or adds latency of its own."""
    now = case.now
    if case.is_queueing or case.running_mean <= 0:
        return None
    at_core = now.cpu_cores is not None and now.cpu_cores >= _CORE_FULL
    added = _added_latency(case)
    is_slow = added is not None and added[0] > max(0.05, 0.3 * added[1])
    if not at_core and not (is_slow and added is not None and added[0] > 0.2):
        return None
    evidence = []
    if now.cpu_cores is not None:
        evidence.append(
            Evidence(f"the API process uses {now.cpu_cores:.2f} of one core", "process_cpu_cores", now.cpu_cores)
        )
    if added is not None:
        evidence.append(
            Evidence(
                f"of {format_seconds(added[1])} to the first token, {format_seconds(added[0])} are neither queue "
                "nor prefill",
                "frontend_latency_s",
                added[0],
            )
        )
    evidence.append(Evidence(f"{case.waiting_mean:.3g} wait at the scheduler", "waiting", case.waiting_mean))
    confidence = 0.85 if at_core and is_slow else 0.7 if at_core else 0.6
    summary = "The API process or the client is the limit: " + evidence[0].text + ", and the engine has no queue."
    return Finding(Limit.FRONTEND, confidence, summary, tuple(evidence), remedies.frontend(case))


def _added_latency(case: Case) -> tuple[float, float] | None:
    """(seconds to the first token outside queue and prefill, seconds to the first token); None where not known."""
    ttft, queue, prefill = case.now.ttft_s, case.now.queue_s, case.now.prefill_s
    if ttft is None or queue is None or prefill is None or min(ttft.count, queue.count, prefill.count) < 5:
        return None
    if case.waiting_mean > 0 or not 0.7 <= ttft.count / queue.count <= 1.4:
        return None  # the first tokens and the finished requests of the window are not the same requests
    if ttft.mean is None or queue.mean is None or prefill.mean is None:
        return None
    return ttft.mean - queue.mean - prefill.mean, ttft.mean


def idle(case: Case) -> Finding | None:
    """Nobody asks for anything."""
    now = case.now
    if max(now.trace.running, default=0.0) > 0 or max(now.trace.waiting, default=0.0) > 0 or case.moved:
        return None
    if now.is_awake is False:
        return Finding(Limit.IDLE, 0.95, "Asleep: the engine was put to sleep.", (Evidence("asleep", "awake", 0.0),))
    evidence = (
        Evidence("0 run, 0 wait", "running", 0.0),
        Evidence("no token and no request in the window", "window_s", now.window_s),
    )
    confidence = 0.95 if case.moved is False else 0.7
    return Finding(Limit.IDLE, confidence, "Idle: no requests.", evidence if case.moved is False else evidence[:1])


def healthy(case: Case) -> Finding | None:
    """The server keeps up."""
    now = case.now
    if case.is_queueing or (case.running_mean <= 0 and not case.moved):
        return None
    evidence = [Evidence(f"{case.running_mean:.3g} run", "running", case.running_mean)]
    waiting = now.trace.waiting
    if waiting and max(waiting) > 0:
        evidence.append(
            Evidence(f"the queue went {waiting[0]:.0f} -> {waiting[-1]:.0f} in the window", "waiting", waiting[-1])
        )
    else:
        evidence.append(Evidence("nobody waits", "waiting", 0.0))
    if case.kv_mean is not None:
        evidence.append(Evidence(f"KV cache {case.kv_mean:.0%} held", "kv_usage", case.kv_mean))
    if now.headroom_requests is not None and now.request_size is not None:
        evidence.append(
            Evidence(
                f"room for {now.headroom_requests} more requests of {format_count(now.request_size.tokens)} tokens",
                "headroom_requests",
                float(now.headroom_requests),
            )
        )
    if now.prefix_queries and not now.prefix_hit_rate:
        evidence.append(Evidence("the prefix cache found nothing", "prefix_hit_rate", 0.0))
    drained = bool(waiting) and max(waiting) > 0
    summary = f"Keeps up: {case.running_mean:.3g} run, " + ("the queue empties." if drained else "nobody waits.")
    return Finding(Limit.HEALTHY, 0.6 if drained else 0.9, summary, tuple(evidence))


FLOW_RULES: tuple[Rule, ...] = (prefix_thrash, decode_bandwidth, frontend, prefix_too_short)
REST_RULES: tuple[Rule, ...] = (idle, healthy)
