"""What to change first: the limit that binds, and what each remedy gives, computed and not guessed.

Knows answers and how to ask again with one thing changed. Floor 1.
"""

from dataclasses import replace

from kvctl.errors import KvctlError
from kvctl.model.layer_shape import LayerKind
from kvctl.sizing.recommend import FP8_ARCHES, Demand, choose
from kvctl.sizing.request import SizeAnswer, SizeRequest, size_up
from kvctl.sizing.users import UsersFit
from kvctl.units import format_bytes, format_count

_NO_CHANGE = "No single change makes it fit: use a larger GPU or a smaller model (--recommend searches)."
_MOST = 4  # lines that a person still reads
_FP8_WEIGHT_ARCHES = (*FP8_ARCHES, "ampere")  # Ampere unpacks FP8 weights before it multiplies


def advise(answer: SizeAnswer, demand: Demand | None = None, users: UsersFit | None = None) -> list[str]:
    """The most useful changes first; empty when nothing was asked that could be better.

    `demand` and `users`: how many were to fit, and whether they do.
    """
    capacity = answer.capacity
    if capacity is None:
        return ["Add --gpu NAME (or --kv-cache-memory-bytes) to see blocks, concurrency and speed."]
    if demand is not None and users is not None and not users.fits:
        lines = _to_meet(answer, demand, users)
    else:
        lines = _to_fit(answer) if not capacity.fits else _to_hold_more(answer)
    lines += _about_hybrids(answer)
    return lines[:_MOST]


def _ask(request: SizeRequest) -> SizeAnswer | None:
    try:
        return size_up(request)
    except KvctlError:
        return None


def _to_fit(answer: SizeAnswer) -> list[str]:
    capacity = answer.capacity
    if capacity is None:
        return []
    lines = []
    if capacity.max_context_tokens > 0:
        lines.append(
            f"--max-model-len {capacity.max_context_tokens} fits (one request of {capacity.max_model_len:,} needs "
            f"{format_bytes(capacity.needed_bytes)}, there are {format_bytes(max(0, capacity.kv_bytes))})."
        )
    fp8 = _with_fp8(answer)
    if fp8 is not None and fp8.capacity is not None and fp8.capacity.max_context_tokens > capacity.max_context_tokens:
        verdict = "fits" if fp8.fits else f"reaches {format_count(fp8.capacity.max_context_tokens)} tokens"
        lines.append(f"--kv-cache-dtype fp8 {verdict}.")
    for tries in _larger_changes(answer):
        for text, changed in tries:
            other = _ask(changed)
            if other is not None and other.fits:
                lines.append(f"{text}.{_other_engine(answer)}")
                break
    return lines or [_NO_CHANGE]


def _to_meet(answer: SizeAnswer, demand: Demand, users: UsersFit) -> list[str]:
    """What makes so many users fit, and what comes nearest."""
    lines = []
    seats = answer.request.max_num_seqs
    if seats is not None and seats < users.users:
        if choose(replace(answer.request, max_num_seqs=users.users), demand, "").fits:
            lines.append(f"--max-num-seqs {users.users} fits.")
    elif users.max_context_tokens > 0 and users.max_users < users.users:
        lines.append(f"{users.users:,} users fit with {users.max_context_tokens:,} tokens each.")
    fp8 = _with_fp8(answer)
    if fp8 is not None:
        choice = choose(fp8.request, demand, "")
        if choice.fits:
            lines.append("--kv-cache-dtype fp8 fits.")
        elif choice.users is not None and choice.users.max_users > users.max_users:
            lines.append(f"--kv-cache-dtype fp8 holds {choice.users.max_users:,} at once.")
    for tries in _larger_changes(answer):
        for text, changed in tries:
            if choose(changed, demand, "").fits:
                lines.append(f"{text}.{_other_engine(answer)}")
                break
    return lines or [_NO_CHANGE]


def _larger_changes(answer: SizeAnswer) -> list[list[tuple[str, SizeRequest]]]:
    """More GPUs, and smaller weights: each from the least change on."""
    request = answer.request
    if request.kv_bytes is not None or request.hardware is None:
        return []
    parallel = request.parallel
    ranks = [
        (f"--tensor-parallel-size {tensor} fits", replace(request, parallel=replace(parallel, tensor=tensor)))
        for tensor in (2, 4, 8)
        if tensor > parallel.tensor
    ]
    weights: list[tuple[str, SizeRequest]] = []
    if answer.weights is not None and answer.weights.format_name in ("bfloat16", "float16"):
        if request.hardware.arch.startswith(_FP8_WEIGHT_ARCHES):
            weights.append(("FP8 weights (--quantization fp8) fit", replace(request, quantization="fp8")))
        weights.append(("A 4-bit checkpoint (AWQ or GPTQ) fits", replace(request, quantization="awq")))
    return [ranks, weights]


def _other_engine(answer: SizeAnswer) -> str:
    return " With vllm serve: kvctl serve splits and quantizes no weights." if answer.rules.name == "kvctl" else ""


def _with_fp8(answer: SizeAnswer) -> SizeAnswer | None:
    request = answer.request
    arch = request.hardware.arch if request.hardware else ""
    if request.kv_dtype != "auto" or (arch and not arch.startswith(FP8_ARCHES)):
        return None
    return _ask(replace(request, kv_dtype="fp8"))


def _to_hold_more(answer: SizeAnswer) -> list[str]:
    capacity, request = answer.capacity, answer.request
    if capacity is None:
        return []
    lines = []
    seqs = answer.limits.max_num_seqs
    if capacity.max_concurrency >= seqs:
        lines.append(f"--max-num-seqs {seqs} binds before memory does: {capacity.max_concurrency:.0f} would fit.")
    fp8 = _with_fp8(answer)
    if fp8 is not None and fp8.capacity is not None and fp8.capacity.max_concurrency > capacity.max_concurrency * 1.1:
        gain = fp8.capacity.max_concurrency / capacity.max_concurrency
        lines.append(f"--kv-cache-dtype fp8 holds {gain:.2f} times as many requests.")
    elif fp8 is not None and fp8.capacity is not None and _has_states(answer):
        lines.append("fp8 KV gives little here: a recurrent state needs its bytes, so the block only grows in tokens.")
    budget = answer.budget
    if budget is not None and budget.activation.value > budget.total_bytes // 25 and request.max_num_seqs is None:
        fewer = _ask(replace(request, max_num_seqs=max(1, seqs // 4)))
        if fewer is not None and fewer.budget is not None:
            gain_bytes = fewer.budget.kv.value - budget.kv.value
            if gain_bytes > budget.total_bytes // 100:
                lines.append(f"--max-num-seqs {max(1, seqs // 4)} leaves {format_bytes(gain_bytes)} more for KV.")
    used = request.utilization or answer.defaults.utilization
    if budget is not None and used < 0.95:
        extra = int(budget.total_bytes * (0.95 - used))
        lines.append(f"--gpu-memory-utilization 0.95 adds {format_bytes(extra)} of KV, if nothing else uses the GPU.")
    return lines


def _has_states(answer: SizeAnswer) -> bool:
    return any(s.kind is LayerKind.STATE for s in answer.specs)


def _about_hybrids(answer: SizeAnswer) -> list[str]:
    pool = answer.pool
    if pool is None or len(pool.groups) < 2:
        return []
    lines = []
    if answer.rules.tokens_are_concurrency or answer.rules.name == "vllm":
        lines.append("The printed KV tokens are no capacity on this hybrid: they change with --max-model-len.")
    if pool.block_tokens > 256:
        lines.append(f"Blocks of {pool.block_tokens:,} tokens: prefixes are shared in steps of that length only.")
    return lines
