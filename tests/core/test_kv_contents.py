"""Whatever is shared, evicted, preempted or overlapped: a step finds in its blocks the keys and values it needs.

The runner here keeps a slot's content as a real one does, from the plan alone: in place of a key and a value it stores
the hash of all tokens up to that position. Before it samples it compares what a request's block tables lead to, as far
as each window reaches back, with the request's own tokens.
"""

import random
from itertools import accumulate

import pytest

from kvctl.core.engine_core import EngineCore
from kvctl.core.kv_cache_groups import KVCacheGroup
from kvctl.core.pipelined_engine_core import PipelinedEngineCore
from kvctl.core.step import ModelRunnerOutput, SchedulerOutput
from tests.support.schedulers import make_request, make_scheduler

BLOCK_SIZE = 4
GROUPS = {
    "full": (KVCacheGroup((0,)),),
    "sliding": (KVCacheGroup((0,), 7),),
    "hybrid": (KVCacheGroup((0,)), KVCacheGroup((1,), 6), KVCacheGroup((2,), 13)),
}


def extend(content: int, token_id: int) -> int:
    return hash((content, token_id))


class MemoryRunner:
    """`tenants`: request id -> the salt under which it may share."""

    def __init__(self, groups: tuple[KVCacheGroup, ...], tenants: dict[str, str | None]) -> None:
        self.groups = groups
        self.tenants = tenants
        self.slots: list[dict[int, int]] = [{} for _ in groups]
        self.contents: dict[str, list[int]] = {}  # what each known token's slot must hold
        self.tables: dict[str, list[list[int]]] = {}
        self.computed: dict[str, int] = {}

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        for request_id in (*plan.finished_request_ids, *plan.preempted_request_ids):
            del self.contents[request_id], self.tables[request_id], self.computed[request_id]
        for new in plan.new_requests:
            start = 0 if self.tenants[new.request_id] is None else 1
            self.contents[new.request_id] = list(accumulate(new.token_ids, extend, initial=start))[1:]
            self.tables[new.request_id] = [list(table) for table in new.block_tables]
            self.computed[new.request_id] = new.num_computed_tokens
        for request_id, added in plan.new_block_ids.items():
            for table, block_ids in zip(self.tables[request_id], added, strict=True):
                table += block_ids
        steps = list(zip(plan.request_ids, plan.num_scheduled_tokens, strict=True))
        for request_id, count in steps:  # all tokens of a step are stored before any is attended to
            first = self.computed[request_id]
            for position in range(first, first + count):
                self.store(request_id, position)
        return ModelRunnerOutput([self.compute(request_id, count) for request_id, count in steps])

    def store(self, request_id: str, position: int) -> None:
        for slots, table in zip(self.slots, self.tables[request_id], strict=True):
            block_id = table[position // BLOCK_SIZE]
            assert block_id != 0, "a token was given the null block"
            slots[block_id * BLOCK_SIZE + position % BLOCK_SIZE] = self.contents[request_id][position]

    def compute(self, request_id: str, count: int) -> int | None:
        contents, first = self.contents[request_id], self.computed[request_id]
        last = first + count - 1
        for group, slots, table in zip(self.groups, self.slots, self.tables[request_id], strict=True):
            oldest = 0 if group.window_tokens is None else max(0, first - group.window_tokens + 1)
            for position in range(oldest, last + 1):
                slot = table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
                assert slots.get(slot) == contents[position], f"{request_id} finds something else at {position}"
        self.computed[request_id] += count
        if self.computed[request_id] < len(contents):
            return None
        token_id = contents[-1] % 5  # few different ones, so that answers too may be shared
        contents.append(extend(contents[-1], token_id))
        return token_id


class Ticks:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def use(core: EngineCore, tenants: dict[str, str | None], rng: random.Random) -> tuple[dict[str, list[int]], int, int]:
    """Documents, prefixes of them and follow-ups arrive at random, some are aborted. Answers, hits, preemptions."""
    answers: dict[str, list[int]] = {}
    prompts: dict[str, list[int]] = {}
    hits = preemptions = 0
    while len(answers) < 40 or core.has_work():
        if len(answers) < 40 and rng.random() < 0.5:
            name = f"r{len(answers)}"
            document = [rng.randrange(3) * 100 + i for i in range(rng.randint(1, 34))]
            earlier = rng.choice([*answers, None])
            if earlier is not None and rng.random() < 0.3:
                document = [*prompts[earlier], *answers[earlier], 7][:34]
            tenants[name] = rng.choice([None, None, "tenant"])
            prompts[name], answers[name] = document, []
            core.add(
                make_request(
                    name, document, max_tokens=rng.randint(1, 14), priority=rng.randrange(3), cache_salt=tenants[name]
                )
            )
        if rng.random() < 0.03 and core.scheduler.requests:
            core.abort(rng.choice(sorted(core.scheduler.requests)))
        result = core.step()
        hits += result.stats.prefix_cache_hits
        preemptions += result.stats.num_preemptions
        for output in result.outputs:
            answers[output.request_id] += output.new_token_ids
        core.scheduler.check_integrity()
    core.close()
    return answers, hits, preemptions


@pytest.mark.parametrize("kind", sorted(GROUPS))
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("core_class", [EngineCore, PipelinedEngineCore])
def test_every_token_finds_the_keys_and_values_of_those_before_it(
    kind: str, policy: str, core_class: type[EngineCore]
) -> None:
    hits = preemptions = 0
    for seed in range(4):
        rng = random.Random(seed)
        tenants: dict[str, str | None] = {}
        scheduler = make_scheduler(
            rng.choice([18, 24, 60]) * len(GROUPS[kind]),
            block_size=BLOCK_SIZE,
            groups=GROUPS[kind],
            policy=policy,
            max_num_seqs=6,
            max_num_batched_tokens=rng.choice([8, 24]),
            max_model_len=50,
            long_prefill_token_threshold=rng.choice([0, 3, 5]),
            scheduler_reserve_full_isl=rng.random() < 0.5,
        )
        _, found, preempted = use(core_class(scheduler, MemoryRunner(GROUPS[kind], tenants), Ticks()), tenants, rng)
        hits += found
        preemptions += preempted
    assert hits > 0 and (preemptions > 0 or kind == "sliding"), "this proves nothing without sharing and pressure"
