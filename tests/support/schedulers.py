"""Small schedulers and a driver for tests of the core. No torch."""

from collections.abc import Callable, Sequence

from kvctl.core.block_pool import BlockPool
from kvctl.core.config import CacheConfig, SchedulerConfig
from kvctl.core.kv_cache_groups import KVCacheGroup
from kvctl.core.kv_cache_manager import KVCacheManager
from kvctl.core.request import Request
from kvctl.core.sampling_params import SamplingParams
from kvctl.core.scheduler import Scheduler
from kvctl.core.step import EngineOutput, ModelRunnerOutput, SchedulerOutput

FULL = (KVCacheGroup((0,)),)


def make_request(request_id: str, tokens: int | Sequence[int], max_tokens: int = 8, **options: object) -> Request:
    """A greedy request; an int makes that many distinct tokens, unlike any other request's."""
    if isinstance(tokens, int):
        base = sum(ord(c) * 257**i for i, c in enumerate(request_id)) % 1_000_000
        tokens = [base * 1000 + i for i in range(tokens)]
        tokens = [t % (1 << 32) for t in tokens]
    params = options.pop("params", None) or SamplingParams(max_tokens=max_tokens, temperature=0)
    return Request(request_id, list(tokens), params, **options)  # type: ignore[arg-type]


def make_scheduler(
    num_blocks: int = 100,
    *,
    block_size: int = 4,
    caching: bool = True,
    groups: Sequence[KVCacheGroup] = FULL,
    **options: object,
) -> Scheduler:
    settings: dict[str, object] = {"max_model_len": 1000, "max_num_seqs": 16, "max_num_batched_tokens": 64}
    settings.update(options)
    config = SchedulerConfig(**settings)  # type: ignore[arg-type]
    manager = KVCacheManager(
        BlockPool(num_blocks, caching),
        CacheConfig(block_size=block_size, enable_prefix_caching=caching),
        groups,
        max_step_tokens=config.max_num_batched_tokens,
    )
    return Scheduler(config, manager)


def next_token(request: Request) -> int:
    """A deterministic 'model': the next token depends on all tokens so far, as a real one's does."""
    return (sum(request.token_ids) * 31 + len(request.token_ids)) % 50_000


def scheduled(plan: SchedulerOutput) -> dict[str, int]:
    """Request id -> tokens of a plan."""
    return dict(zip(plan.request_ids, plan.num_scheduled_tokens, strict=True))


def run_step(
    scheduler: Scheduler, token: Callable[[Request], int] = next_token
) -> tuple[SchedulerOutput, list[EngineOutput]]:
    """Schedule, 'compute', update, check integrity."""
    plan = scheduler.schedule()
    scheduler.check_integrity()
    tokens: list[int | None] = []
    for request_id in plan.request_ids:
        request = scheduler.requests[request_id]
        tokens.append(token(request) if request.num_computed_tokens == request.num_tokens else None)
    outputs = scheduler.update(plan, ModelRunnerOutput(tokens))
    scheduler.check_integrity()
    return plan, outputs


def run_all(scheduler: Scheduler, max_steps: int = 10_000) -> dict[str, list[int]]:
    """Run to the end; request id -> generated tokens."""
    generated: dict[str, list[int]] = {}
    for _ in range(max_steps):
        if not scheduler.has_work:
            return generated
        for output in run_step(scheduler)[1]:
            generated.setdefault(output.request_id, []).extend(output.new_token_ids)
    raise AssertionError(f"not done after {max_steps} steps: {list(scheduler.requests.values())}")
