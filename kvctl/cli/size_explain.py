"""`kvctl size --explain`: every formula with its numbers and its source, as plain lines. Floor 4."""

from collections.abc import Iterator

from kvctl.cli.size_run import Findings
from kvctl.model.layer_shape import LayerKind
from kvctl.sizing.request import SizeAnswer
from kvctl.units import GIB


def explain(findings: Findings) -> Iterator[str]:
    """Lines from bytes per token down to speed."""
    answer = findings.answer
    yield from _kv(answer)
    yield from _weights(answer)
    yield from _memory(answer)
    yield from _blocks(answer)
    yield from _speed(findings)


def _kv(answer: SizeAnswer) -> Iterator[str]:
    shape, tensor = answer.request.model.shape, answer.request.parallel.tensor
    for kind, count in shape.kind_counts.items():
        layer = next(x for x in shape.layers if x.name == kind)
        spec = next((s for s in answer.all_specs if s.layer_index == layer.index and s.kind is layer.kind), None)
        if spec is None:
            yield f"{count} layers '{kind}': keep nothing of their own"
        elif layer.kind is LayerKind.STATE:
            yield f"{count} layers '{kind}': {spec.state_bytes or 0:,} bytes of state per request and GPU each"
        elif layer.kind is LayerKind.MLA:
            extra = f" + {layer.indexer_bytes} B of index" if layer.indexer_bytes else ""
            yield f"{count} layers '{kind}': {layer.key_dim} elements{extra} = {spec.bytes_per_token:,} B per token"
        else:
            heads = max(1, layer.num_kv_heads // tensor)
            window = f", the last {layer.window_tokens:,} tokens" if layer.window_tokens else ""
            yield (
                f"{count} layers '{kind}'{window}: {heads} heads x ({layer.key_dim} + {layer.value_dim}) elements "
                f"= {spec.bytes_per_token:,} B per token and GPU"
            )
    per_gpu = answer.bytes_per_token_per_gpu
    yield f"ideal cost of one more token: {answer.bytes_per_token:,} B in all, {per_gpu:,} B a GPU"
    yield "  source: key + value of each layer (PagedAttention paper, sec. 3); checked against printed server logs"


def _weights(answer: SizeAnswer) -> Iterator[str]:
    weights = answer.weights
    if weights is None:
        yield "weights: this family's matrices are not known here, and there were no weight files to read"
        return
    yield (
        f"weights: {weights.num_parameters:,} parameters, {weights.total_bytes:,} B in {weights.format_name} "
        f"({weights.source}); {weights.bytes_per_gpu:,} B on the fullest GPU"
    )


def _memory(answer: SizeAnswer) -> Iterator[str]:
    budget, hardware = answer.budget, answer.request.hardware
    if budget is None:
        return
    used = answer.request.utilization or answer.defaults.utilization
    total = budget.total_bytes / GIB
    yield f"asked for: {total:.2f} GiB x {used:g} = {budget.requested_bytes / GIB:.2f} GiB"
    if hardware is not None:
        yield f"  total: {hardware.sources.get('torch_total_gib', 'profile')}"
    yield (
        f"activations: a step of {answer.limits.max_num_batched_tokens:,} tokens through the widest layer, or the "
        f"sampling of {answer.limits.max_num_seqs} rows x {answer.request.model.shape.vocab_size:,} entries, "
        f"whichever is larger = {budget.activation.value / GIB:.2f} GiB"
    )
    inside = "inside the budget" if answer.rules.estimates_graphs else "outside the budget in this engine"
    graphs, other = budget.graphs.value / GIB, budget.other.value / GIB
    yield f"CUDA graphs: {graphs:.2f} GiB ({inside}); context and NCCL: {other:.2f} GiB"
    yield "  source: fits to the start-up logs in tests/data/sizing; the ranges are their spread"
    yield f"KV cache: what is left = {budget.kv.value / GIB:.2f} GiB"


def _blocks(answer: SizeAnswer) -> Iterator[str]:
    capacity, pool = answer.capacity, answer.pool
    if capacity is None or pool is None:
        return
    for group in pool.groups:
        each = f"{group.block_tokens:,} tokens" if group.block_tokens else "one state"
        pad = f" + {group.padding_layers} padding" if group.padding_layers else ""
        yield f"group {group.kind.value}: {len(group.layer_indices)} layers{pad}, a block holds {each}"
    yield f"blocks: {capacity.kv_bytes:,} B // {pool.block_bytes:,} B = {capacity.num_blocks:,}"
    need = pool.blocks_per_request(capacity.max_model_len, answer.limits)
    yield (
        f"one request of {capacity.max_model_len:,} tokens: {need:,} blocks; "
        f"{capacity.num_blocks:,} / {need:,} = {capacity.max_concurrency:.2f} at once"
    )
    yield "  source: vLLM's kv_cache_utils at the version named; checked against printed server logs"


def _speed(findings: Findings) -> Iterator[str]:
    speed, hardware = findings.speed, findings.answer.request.hardware
    if speed is None or hardware is None:
        return
    peak = hardware.tflops.get(speed.compute_format, 0.0)
    yield (
        f"ridge point: {peak:g} TFLOP/s {speed.compute_format} / {hardware.bandwidth_gb_s / 1000:g} TB/s "
        f"= {speed.ridge_flop_per_byte:.0f} FLOP per byte"
    )
    yield "step time: max(bytes / (bandwidth x 0.55..0.70..0.85), FLOP / (peak x 0.28..0.42..0.62)) + link + overhead"
    yield "  source: llmfit, ninfer, aiconfigurator (memory), inference-sim (compute); see sizing/speed.py"
    for row in speed.decode:
        yield f"batch {row.batch}: {row.intensity:.1f} FLOP per byte, {row.kv_read_share:.0%} of the bytes are KV"
