"""The limits that make requests wait: KV blocks, seats, the step's tokens, a hold-up of their own, or a stuck server.

Pure: one function per limit, each looks at one case and answers with a finding or None. The signatures are those
of the field: waiting grows while KV usage is near 1 and preemptions rise is a KV shortage; waiting grows while
usage is low is max_num_seqs or the token budget. What the server does not export (vLLM: both of these maxima) is
inferred, and the evidence says so. Floor 3.
"""

from collections.abc import Callable

from kvctl.metrics.server_names import Gauge
from kvctl.top import remedies
from kvctl.top.case import Case
from kvctl.top.verdict import Evidence, Finding, Limit
from kvctl.units import format_count, format_seconds

_STUCK_AFTER_S = 5.0  # with a queue and nothing running
_STUCK_RUNNING_S = 8.0  # with something running: one long step is not yet a stuck server
_HALF = 0.5

Rule = Callable[[Case], Finding | None]


def kv_blocks(case: Case) -> Finding | None:
    """The KV cache has no room: requests wait for blocks or are preempted to free some."""
    now = case.now
    preempted = (now.preemptions or 0) > 0
    said = case.reason_share("kv_blocks", "preemption")
    if not preempted and not case.is_queueing:
        return None
    if said is not None and said >= _HALF:
        confidence = 0.65 + 0.32 * said
    elif preempted and (case.is_kv_tight or case.is_queueing):
        confidence = 0.95 if case.is_kv_tight else 0.75
    elif preempted:
        confidence = 0.6
    elif case.is_kv_tight:
        seats_left = case.seats_taken is not None and case.seats_taken < 0.95
        confidence = 0.9 if seats_left else 0.75
    else:
        return None
    if said is not None and said < 0.2 and not preempted:
        confidence = min(confidence, 0.4)
    evidence = [*_waiting(case), *_usage(case)]
    if now.preemptions is not None:
        evidence.append(
            Evidence(
                f"{format_count(now.preemptions)} preemptions in the window ({now.preemptions_per_s or 0:.2g}/s)",
                "preemptions_per_s",
                now.preemptions_per_s,
            )
        )
    if said is not None:
        evidence.append(
            Evidence(f"the server puts {said:.0%} of the waiting down to KV blocks", "waiting_reason", said)
        )
    if now.request_size is not None and now.kv_capacity_tokens:
        fit = now.kv_capacity_tokens / now.request_size.tokens
        evidence.append(
            Evidence(
                f"the cache holds {fit:.1f} requests of {format_count(now.request_size.tokens)} tokens "
                f"({now.request_size.source})",
                "requests_that_fit",
                fit,
            )
        )
    used = f"{case.kv_mean:.0%} of " if case.kv_mean is not None else ""
    cache = f"{format_count(now.kv_capacity_tokens)} tokens" if now.kv_capacity_tokens else "the KV cache"
    waiting = f"{case.waiting_mean:.0f} requests wait" if case.is_queueing else "requests are preempted"
    summary = f"Short of KV cache: {waiting} while {used}{cache} is held"
    summary += f", {now.preemptions_per_s:.2g} preemptions/s." if preempted and now.preemptions_per_s else "."
    return Finding(Limit.KV_BLOCKS, confidence, summary, tuple(evidence), remedies.more_kv(case))


def max_num_seqs(case: Case) -> Finding | None:
    """Every seat is taken while the KV cache has room."""
    now = case.now
    if not case.is_queueing:
        return None
    said = case.reason_share("max_num_seqs")
    known = now.max_num_seqs
    if said is not None and said >= _HALF:
        confidence, seats = 0.65 + 0.32 * said, known or round(case.running_mean)
    elif known is not None:
        if (case.seats_taken or 0) < 0.85:
            return None
        confidence, seats = 0.95, known
    else:
        if case.flat_top is None:
            return None
        confidence, seats = (0.8 if case.is_flat_top_proven else 0.6), case.flat_top[0]
    if case.is_kv_tight or (now.preemptions or 0) > 0:
        confidence = min(confidence, 0.55)
    if (case.are_steps_full and (case.prefill_share or 0) >= _HALF) or case.do_steps_look_full:
        confidence = min(confidence, 0.6)
    if said is not None and said < 0.2:
        confidence = min(confidence, 0.4)
    evidence = [Evidence(f"{case.running_mean:.3g} run, {seats} may at once", "running", case.running_mean)]
    if known is None and case.flat_top is not None:
        top, share = case.flat_top
        evidence.append(
            Evidence(
                f"max_num_seqs is inferred: running stays at {top} in {share:.0%} of {len(now.trace.running)} readings",
                "max_num_seqs_inferred",
                float(top),
            )
        )
    evidence += [*_waiting(case), *_usage(case)]
    if said is not None:
        evidence.append(Evidence(f"the server puts {said:.0%} of the waiting down to this", "waiting_reason", said))
    inferred = "" if known is not None else " (inferred)"
    usage = f" while {1 - case.kv_mean:.0%} of the KV cache is free" if case.kv_mean is not None else ""
    summary = f"Short of seats: {case.waiting_mean:.0f} requests wait behind max_num_seqs {seats}{inferred}{usage}."
    return Finding(Limit.MAX_NUM_SEQS, confidence, summary, tuple(evidence), remedies.more_seats(case, seats))


def token_budget(case: Case) -> Finding | None:
    """Steps are full of prompt tokens: requests wait for their prefill."""
    now = case.now
    said = case.reason_share("token_budget")
    if not case.is_queueing or now.step_tokens is None or now.step_tokens.mean is None:
        return None
    prefill = case.prefill_share
    top = now.step_tokens_histogram.top_bucket() if now.step_tokens_histogram else None
    budget = now.max_num_batched_tokens
    if said is not None and said >= _HALF:
        confidence = 0.65 + 0.32 * said
    elif budget is not None:
        if not case.are_steps_full or prefill is None or prefill < _HALF:
            return None
        confidence = 0.9
    else:
        if top is None or top[2] < 0.3 or top[0] < 16 or prefill is None or prefill < _HALF:
            return None
        confidence = 0.8 if case.do_steps_look_full else 0.7 if case.flat_top is None else 0.5
    if case.is_kv_tight or (now.preemptions or 0) > 0:
        confidence = min(confidence, 0.6)
    if said is not None and said < 0.2:
        confidence = min(confidence, 0.4)
    mean = now.step_tokens.mean
    evidence = [Evidence(f"a step computes {format_count(mean)} tokens on average", "step_tokens_mean", mean)]
    if budget is not None:
        evidence.append(Evidence(f"it may compute {format_count(budget)}", "max_num_batched_tokens", float(budget)))
    elif top is not None:
        evidence.append(
            Evidence(
                f"max_num_batched_tokens is inferred: {top[2]:.0%} of the steps lie in the highest used bucket, "
                f"{format_count(top[0])} .. {format_count(top[1])} tokens",
                "max_num_batched_tokens_inferred",
                now.step_tokens_histogram.top_bucket_mean() if now.step_tokens_histogram else None,
            )
        )
    if prefill is not None:
        evidence.append(Evidence(f"{prefill:.0%} of the computed tokens belong to prompts", "prefill_share", prefill))
    evidence += [*_waiting(case), *_usage(case)]
    if said is not None:
        evidence.append(Evidence(f"the server puts {said:.0%} of the waiting down to this", "waiting_reason", said))
    if now.ttft_s is not None and now.ttft_s.mean is not None:
        evidence.append(
            Evidence(f"mean time to first token {format_seconds(now.ttft_s.mean)}", "ttft_mean_s", now.ttft_s.mean)
        )
    limit = f"{format_count(budget)} tokens" if budget is not None else "the token budget (inferred)"
    summary = (
        f"Prefill bound: {case.waiting_mean:.0f} requests wait while each step takes in at most {limit} "
        "of their prompts."
    )
    return Finding(Limit.TOKEN_BUDGET, confidence, summary, tuple(evidence), remedies.more_step_tokens(case))


def deferred(case: Case) -> Finding | None:
    """Requests wait for something of their own: a LoRA slot, a grammar, blocks from another server."""
    now = case.now
    held = now.waiting_deferred
    if not held or not case.is_queueing:
        return None
    share = held / max(held, now.waiting or held)
    if share < _HALF:
        return None
    evidence = (
        Evidence(
            f"{format_count(held)} of {format_count(now.waiting or held)} wait deferred", "waiting_deferred", held
        ),
        *_usage(case),
    )
    summary = f"{format_count(held)} requests are held back for a reason of their own, not for lack of room."
    return Finding(Limit.DEFERRED, 0.6 + 0.35 * share, summary, evidence, remedies.deferred(case))


def stuck(case: Case) -> Finding | None:
    """Requests are there and nothing moves."""
    now = case.now
    if case.moved is not False or now.window_s is None or now.is_awake is False:
        return None
    waits, runs = min(now.trace.waiting, default=0.0) > 0, min(now.trace.running, default=0.0) > 0
    if not (waits or runs):
        return None
    patience_s = max(_STUCK_RUNNING_S, 2 * (now.slowest_step_s or 0.0)) if runs else _STUCK_AFTER_S
    if now.window_s < 0.9 * patience_s:
        return None
    confidence = 0.95 if not runs else 0.8 if waits else 0.6
    evidence = (
        Evidence(f"no token and no request finished in {format_seconds(now.window_s)}", "window_s", now.window_s),
        *_waiting(case),
        Evidence(f"{case.running_mean:.3g} run", Gauge.RUNNING.value, case.running_mean),
    )
    summary = (
        f"Stuck: {case.waiting_mean:.0f} wait, {case.running_mean:.3g} run, and nothing has moved for "
        f"{format_seconds(now.window_s)}."
    )
    return Finding(Limit.STUCK, confidence, summary, evidence, remedies.stuck(case))


def _waiting(case: Case) -> list[Evidence]:
    share = case.waiting_share
    return [
        Evidence(
            f"{case.waiting_mean:.3g} requests wait on average, somebody in {share:.0%} of the readings",
            "waiting",
            case.waiting_mean,
        )
    ]


def _usage(case: Case) -> list[Evidence]:
    now = case.now
    if case.kv_mean is None or case.kv_peak is None:
        return []
    tokens = f" of {format_count(now.kv_capacity_tokens)} tokens" if now.kv_capacity_tokens else ""
    evidence = [
        Evidence(f"KV cache {case.kv_mean:.0%} held, at most {case.kv_peak:.0%}{tokens}", "kv_usage", case.kv_mean)
    ]
    if now.headroom_requests is not None and now.request_size is not None:
        evidence.append(
            Evidence(
                f"room for {now.headroom_requests} more requests of {format_count(now.request_size.tokens)} tokens "
                f"({now.request_size.source})",
                "headroom_requests",
                float(now.headroom_requests),
            )
        )
    return evidence


QUEUE_RULES: tuple[Rule, ...] = (deferred, kv_blocks, max_num_seqs, token_budget)
