"""Random use of the whole core, with `check_integrity` after every operation, and the experiment of record."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvctl.core.kv_cache_groups import KVCacheGroup
from kvctl.core.request import Request, RequestStatus
from kvctl.core.sampling_params import SamplingParams
from kvctl.core.scheduler import Scheduler
from tests.support.schedulers import make_request, make_scheduler, next_token, run_all, run_step

GROUPS = {
    "full": (KVCacheGroup((0,)),),
    "sliding": (KVCacheGroup((0,), 7),),
    "hybrid": (KVCacheGroup((0,)), KVCacheGroup((1,), 6), KVCacheGroup((2,), 13)),
}


class CoreMachine(RuleBasedStateMachine):
    """Adds, steps, aborts and resets in any order; what was generated must not depend on it."""

    @initialize(
        kind=st.sampled_from(sorted(GROUPS)),
        policy=st.sampled_from(["fcfs", "priority"]),
        num_blocks=st.integers(20, 60),
        caching=st.booleans(),
        budget=st.sampled_from([4, 9, 32]),
        threshold=st.sampled_from([0, 3]),
        reserve=st.booleans(),
        watermark=st.sampled_from([0.0, 0.1]),
    )
    def start(self, kind: str, num_blocks: int, caching: bool, budget: int, threshold: int, **options: object) -> None:
        options["scheduler_reserve_full_isl"] = options.pop("reserve")
        self.s: Scheduler = make_scheduler(
            num_blocks,
            groups=GROUPS[kind],
            caching=caching,
            max_num_batched_tokens=budget,
            max_num_seqs=4,
            max_model_len=60,
            long_prefill_token_threshold=threshold,
            **options,
        )
        self.s._is_still_refused = self.checked(self.s._is_still_refused)  # type: ignore[method-assign]
        self.count = 0
        self.prompts: dict[str, list[int]] = {}
        self.generated: dict[str, list[int]] = {}
        self.ended: set[str] = set()

    def checked(self, is_still_refused: Callable[[Request], bool]) -> Callable[[Request], bool]:
        """What is not looked up again would be refused again."""

        def check(request: Request) -> bool:
            is_refused = is_still_refused(request)
            if is_refused:
                manager = self.s.kv_cache_manager
                watermark = int(self.s.config.watermark * manager.pool.num_blocks)
                prefix = manager.find_cached_prefix(request)
                assert (
                    manager.allocate_slots(
                        request, 1, prefix, reserve_tokens=request.num_tokens, watermark_blocks=watermark
                    )
                    is None
                )
            return is_refused

        return check

    @rule(
        shared=st.integers(0, 3),
        length=st.integers(1, 30),
        max_tokens=st.integers(1, 12),
        priority=st.integers(0, 2),
        salt=st.sampled_from([None, "x"]),
    )
    def add(self, shared: int, length: int, max_tokens: int, priority: int, salt: str | None) -> None:
        self.count += 1
        name = f"r{self.count}"
        tokens = [shared * 100 + i for i in range(length)]
        request = Request(
            name, tokens, SamplingParams(max_tokens=max_tokens, temperature=0), float(self.count), priority, salt
        )
        if length >= self.s._capacity_tokens:
            return
        self.s.add(request)
        self.prompts[name] = tokens
        self.generated[name] = []

    @rule(times=st.integers(1, 6))
    def step(self, times: int) -> None:
        for _ in range(times):
            plan, outputs = run_step(self.s)
            assert plan.total_num_scheduled_tokens == sum(plan.num_scheduled_tokens)
            assert plan.total_num_scheduled_tokens <= self.s.config.max_num_batched_tokens
            assert len(plan.request_ids) == len(set(plan.request_ids)) <= self.s.config.max_num_seqs
            assert all(count > 0 for count in plan.num_scheduled_tokens)
            for output in outputs:
                self.generated[output.request_id] += output.new_token_ids
                if output.finish_reason:
                    assert output.request_id not in self.ended
                    self.ended.add(output.request_id)

    @precondition(lambda self: self.s.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.s.requests)))
        assert self.s.abort(name)
        self.ended.add(name)

    @rule()
    def reset(self) -> None:
        assert self.s.reset_prefix_cache() == (
            not any(r.status is RequestStatus.RUNNING for r in self.s.requests.values())
        )

    @invariant()
    def holds(self) -> None:
        self.s.check_integrity()
        for request in self.s.running:
            assert 0 < request.num_computed_tokens <= request.num_tokens
            assert request.num_computed_tokens <= request.allocated_tokens

    def teardown(self) -> None:
        if not hasattr(self, "s"):
            return
        for _ in range(3000):
            if not self.s.has_work:
                break
            self.step(1)
        assert not self.s.has_work
        pool = self.s.kv_cache_manager.pool
        assert pool.num_free_blocks == pool.num_usable_blocks
        for name, tokens in self.generated.items():
            twin = Request(name, self.prompts[name], SamplingParams())
            for token in tokens:  # what a request generates depends on its own tokens only
                assert token == next_token(twin)
                twin.token_ids.append(token)


TestCoreMachine = CoreMachine.TestCase
TestCoreMachine.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


@settings(max_examples=50, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    num_blocks=st.integers(16, 40),
    budget=st.integers(8, 64),
)
def test_every_request_ends_with_all_its_tokens(lengths: list[int], num_blocks: int, budget: int) -> None:
    s = make_scheduler(num_blocks, max_num_batched_tokens=budget, max_num_seqs=8)
    for index, length in enumerate(lengths):
        s.add(make_request(f"r{index}", length, max_tokens=10))
    assert {name: len(tokens) for name, tokens in run_all(s).items()} == {f"r{i}": 10 for i in range(len(lengths))}


def test_cyclic_reading_is_the_worst_case_of_lru() -> None:
    """The experiment of record: 1,345 blocks of 16 tokens, ten documents of 5,033 tokens, one at a time."""
    s = make_scheduler(1345, block_size=16, max_model_len=8192, max_num_batched_tokens=8192)
    documents = [[number * 10_000 + i for i in range(5033)] for number in range(10)]

    def read(order: list[int], name: str) -> int:
        hits = 0
        for number in order:
            s.add(make_request(f"{name}-{number}", documents[number], max_tokens=1))
            while s.has_work:
                for output in run_step(s)[1]:
                    hits += output.num_cached_tokens
        return hits

    forward = list(range(10))
    assert read(forward, "first") == 0
    assert read(forward, "again") == 0
    assert read(forward[::-1], "reverse") == 21_488


@pytest.mark.parametrize("num_running", [1, 8])
def test_a_decode_step_allocates_no_more_than_it_must(num_running: int) -> None:
    s = make_scheduler(200, block_size=16, max_num_seqs=8)
    for index in range(num_running):
        s.add(make_request(f"r{index}", 5, max_tokens=30))
    run_step(s)
    plans = [run_step(s)[0] for _ in range(29)]
    with_blocks = [plan for plan in plans if plan.new_block_ids]
    assert len(with_blocks) == 2  # tokens 17 and 33 of each
    assert all(len(plan.new_block_ids) == num_running for plan in with_blocks)
