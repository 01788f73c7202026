"""How long the small kernels of a layer take, beside the time their bytes should take."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from gpucheck.bench import Bench
from kvctl.sizing.kernel_time import Work, rows_work, store_kv_work

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INNER = 28, 4, 128, 3584, 18944  # Qwen2.5-7B


def layer_speed(bench: Bench) -> Iterator[dict[str, Any]]:
    """Norms, gates and the store of a decode step of 64 and of a prompt of 8,192 tokens."""
    ops, rates = bench.ops(), bench.ceilings()
    heads, kv_heads, hidden, inner = (4, 2, 128, 256) if bench.dry else (HEADS, KV_HEADS, HIDDEN, INNER)
    for tokens in (3,) if bench.dry else (64, 8192):

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device=bench.device).bfloat16()

        x, residual, weight = random(tokens, hidden), random(tokens, hidden), random(hidden)
        gates = random(tokens, 2 * inner)
        row = random(tokens, heads + 2 * kv_heads, HEAD_DIM)
        query, key, value = row.split_with_sizes([heads, kv_heads, kv_heads], dim=1)
        caches = [random(tokens // 16 + 2, kv_heads, 16, HEAD_DIM) for _ in range(2)]
        slots, positions = (torch.arange(n, n + tokens, device=bench.device) for n in (16, 0))
        table = torch.randn(tokens, HEAD_DIM, device=bench.device)
        store = store_kv_work(tokens, kv_heads, HEAD_DIM, 2)
        rotate = rows_work(tokens, heads * HEAD_DIM, heads * HEAD_DIM)
        cases: dict[str, tuple[Callable[[int], Any], Work]] = {
            "norm": (lambda _, x=x, w=weight: ops.rms_norm(x, w, 1e-6), rows_work(tokens, hidden, hidden)),
            "residual norm": (
                lambda _, x=x, r=residual, w=weight: ops.rms_norm_residual(x, r, w, 1e-6),
                rows_work(tokens, 2 * hidden, 2 * hidden),
            ),
            "silu and mul": (lambda _, x=gates: ops.silu_and_mul(x), rows_work(tokens, 2 * inner, inner)),
            "rotate and store": (
                lambda _, a=(query, key, value, positions, table, *caches, slots): ops.rotary_and_store_kv(*a),
                Work(store.num_bytes + rotate.num_bytes, 0),
            ),
        }
        for name, (run, work) in cases.items():
            seconds = bench.median_s(run)
            found = {"case": f"{name}, {tokens} tokens", "predicted_us": round(work.seconds(rates) * 1e6, 1)}
            yield found | ({"measured_us": round(seconds * 1e6, 1)} if seconds else {})
