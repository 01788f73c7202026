"""What to change, with values computed from the numbers at hand. Pure.

Each function belongs to one limit. An advice that cannot name a value says what to find out instead. Values are
rounded to what a person would type. Floor 3.
"""

import math

from kvctl.metrics.server_names import Server
from kvctl.top.case import Case
from kvctl.top.flags import Setting, flags
from kvctl.top.verdict import Advice
from kvctl.units import GIB, MIB, format_bytes, format_count, format_seconds

_MAX_GROWTH = 8  # no advice multiplies a memory by more than this
_FULL_PRECISION = ("auto", "float16", "bfloat16", "float32", "half", "none")


def more_kv(case: Case) -> tuple[Advice, ...]:
    """KV cache is short: more memory for it, smaller entries, or fewer requests at once."""
    now = case.now
    advice: list[Advice] = []
    size, capacity = now.request_size, now.kv_capacity_tokens
    if size is not None and capacity and size.tokens > 0:
        wanted = math.ceil(case.running_mean + case.waiting_mean)
        need_tokens = wanted * size.tokens
        if need_tokens > capacity:
            factor = min(need_tokens / capacity, float(_MAX_GROWTH))
            text = (
                f"{wanted} requests of {format_count(size.tokens)} tokens want {format_count(need_tokens)} tokens of "
                f"KV, {need_tokens / capacity:.1f} times the {format_count(capacity)} there are"
            )
            if now.kv_cache_bytes:
                target = _memory(now.kv_cache_bytes * factor)
                text += f": {format_bytes(now.kv_cache_bytes)} -> {target}"
                advice.append(Advice(text, flags(Setting.KV_MEMORY, target)))
            else:
                advice.append(Advice(f"{text}: give it more memory", flags(Setting.KV_MEMORY)))
        fit = int(capacity / size.tokens)
        if (now.preemptions or 0) > 0 and fit >= 1 and fit < case.running_mean + 1:
            before = f" {now.max_num_seqs} ->" if now.max_num_seqs else ""
            advice.append(
                Advice(
                    f"To stop the preemptions without more memory:{before} {fit} seats, as many as fit whole",
                    flags(Setting.SEATS, str(fit)),
                )
            )
    utilization = now.settings.gpu_memory_utilization
    if utilization is not None and utilization < 0.95 and now.server is not Server.KVCTL:
        advice.append(
            Advice(f"The server may use {utilization:.0%} of the device's memory", flags(Setting.MEMORY_SHARE, "0.95"))
        )
    dtype = now.settings.dtype
    if capacity and now.server is not Server.KVCTL and (dtype is None or dtype.lower() in _FULL_PRECISION):
        advice.append(
            Advice(
                f"fp8 doubles {format_count(capacity)} tokens to {format_count(capacity * 2)} (check the answers)",
                flags(Setting.KV_DTYPE, "fp8"),
            )
        )
    if not advice:
        advice.append(Advice("Give the KV cache more memory, or send shorter requests", flags(Setting.KV_MEMORY)))
    return tuple(advice)


def more_seats(case: Case, seats: int) -> tuple[Advice, ...]:
    """All seats taken: as many more as the queue wants and the KV cache holds."""
    now = case.now
    wanted = seats + math.ceil(case.waiting_mean)
    room, size = now.headroom_requests, now.request_size
    if room is None or size is None:
        target = _rounded(wanted)
        text = f"{seats} -> {target} seats takes the queue in; the page does not say whether the KV cache has room"
        return (Advice(text, flags(Setting.SEATS, str(target))),)
    if room == 0:
        text = "More seats would only move the queue to the KV cache, which has no room for one more request"
        return (Advice(text), *more_kv(case))
    target = seats + room if wanted > seats + room else min(_rounded(wanted), seats + room)
    text = (
        f"{seats} -> {target} seats: KV headroom is {room} more requests of the observed size "
        f"({format_count(size.tokens)} tokens)"
    )
    advice = [Advice(text, flags(Setting.SEATS, str(target)))]
    budget = now.max_num_batched_tokens
    if budget is not None and target > budget:
        advice.append(Advice(f"A step of {budget} tokens gives each seat one", flags(Setting.STEP_TOKENS, str(target))))
    return tuple(advice)


def more_step_tokens(case: Case) -> tuple[Advice, ...]:
    """Prefill bound: larger steps, less to compute, or more servers."""
    now = case.now
    budget = now.max_num_batched_tokens
    seen = now.step_tokens_histogram.top_bucket_mean() if now.step_tokens_histogram else None
    basis = float(budget) if budget is not None else seen
    advice: list[Advice] = []
    prompt = now.request_size.prompt_tokens if now.request_size is not None else None
    if basis:
        target = 1 << math.ceil(math.log2(max(basis * 2, min(prompt or 0.0, basis * 8))))
        text = (
            f"{'' if budget is not None else 'about '}{format_count(basis)} -> {format_count(target)} tokens per step"
        )
        if prompt:
            text += f": a prompt of {format_count(prompt)} tokens takes {math.ceil(prompt / basis)} steps now"
            text += f", then {math.ceil(prompt / target)}"
        if now.itl_s is not None and now.itl_s.mean is not None:
            text += f" (each step gets longer; tokens now come every {format_seconds(now.itl_s.mean)})"
        advice.append(Advice(text, flags(Setting.STEP_TOKENS, str(target))))
    if now.prefix_hit_rate is not None and now.prefix_hit_rate < 0.5:
        advice.append(
            Advice(f"Only {now.prefix_hit_rate:.0%} of the prompt tokens come from the cache: put what is common first")
        )
    rate = now.computed_prompt_tokens_per_s
    speed = f" ({format_count(rate)} prompt tokens/s now)" if rate else ""
    advice.append(Advice(f"If a larger step does not raise prompt tokens/s{speed}, compute is the limit: add a server"))
    return tuple(advice)


def deferred(case: Case) -> tuple[Advice, ...]:
    """Requests are held back: what to look at."""
    advice = []
    if case.now.max_loras:
        more = case.now.max_loras * 2
        advice.append(
            Advice(f"With LoRA: {case.now.max_loras} -> {more} adapters at once", flags(Setting.MAX_LORAS, str(more)))
        )
    advice.append(Advice("With structured output: reuse few schemas, each new one is compiled first"))
    advice.append(Advice("With remote KV: look at the connector and at the server that sends the blocks"))
    return tuple(advice)


def stuck(case: Case) -> tuple[Advice, ...]:
    """Nothing moves: restart, after a look at the log."""
    return (Advice("Read the server's log, then restart it: a queue that does not move does not heal by itself"),)


def faster_decode(case: Case) -> tuple[Advice, ...]:
    """Decode reads as fast as the memory allows: read less, or with more devices."""
    return (
        Advice("Fewer bytes per step: quantized weights", flags(Setting.QUANTIZATION, "fp8")),
        Advice("Smaller KV entries", flags(Setting.KV_DTYPE, "fp8")),
        Advice("More memory bandwidth: split the model over two devices", flags(Setting.TENSOR_PARALLEL, "2")),
        Advice("More seats would not help: tokens/s no longer rises with running requests"),
    )


def keep_prefixes(case: Case) -> tuple[Advice, ...]:
    """Prefixes are evicted before they come back: a larger cache, a second tier, or another order."""
    now = case.now
    advice: list[Advice] = []
    capacity, n_bytes = now.kv_capacity_tokens, now.kv_cache_bytes
    if capacity:
        text = f"{format_count(capacity)} tokens do not hold what comes back; try {format_count(capacity * 2)}"
        advice.append(Advice(text, flags(Setting.KV_MEMORY, _memory(n_bytes * 2)) if n_bytes else ()))
    tier = str(math.ceil(n_bytes * 4 / GIB)) if n_bytes else ""
    advice.append(Advice("Keep evicted blocks in host memory", flags(Setting.KV_OFFLOAD, tier)))
    advice.append(Advice("Send requests of one document one after the other, or each document to one server"))
    return tuple(advice)


def share_more(case: Case) -> tuple[Advice, ...]:
    """Nothing is found in the prefix cache: make whole blocks equal."""
    now = case.now
    advice: list[Advice] = []
    if (case.miss_share("disabled") or 0) > 0.5 or now.settings.prefix_caching is False:
        return (Advice("Prefix caching is off", flags(Setting.PREFIX_CACHING)),)
    block = now.settings.block_size
    if block is not None and block > 16:
        advice.append(
            Advice(f"Blocks of {block} -> 16 tokens share shorter beginnings", flags(Setting.BLOCK_SIZE, "16"))
        )
    advice.append(Advice("Put what is the same for all (instructions, tools, documents) first, what differs last"))
    return tuple(advice)


def frontend(case: Case) -> tuple[Advice, ...]:
    """The API process or the client is the limit."""
    return (
        Advice("More API processes", flags(Setting.API_PROCESSES, "2")),
        Advice("Run `kvctl bench` from another machine: it says whether the client is the limit"),
    )


def _memory(n_bytes: float) -> str:
    """A memory size as one types it: whole MiB below 4 GiB, then tenths of GiB, rounded up."""
    if n_bytes < 4 * GIB:
        return f"{math.ceil(n_bytes / MIB)}MiB"
    return f"{math.ceil(n_bytes / GIB * 10) / 10:g}GiB"


def _rounded(number: int) -> int:
    """Up to a multiple of 8 from 16 on: a round number of seats."""
    return number if number < 16 else math.ceil(number / 8) * 8
