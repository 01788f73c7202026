import random

import pytest

from kvctl.core.engine_core import EngineCore
from kvctl.core.pipelined_engine_core import PipelinedEngineCore
from kvctl.core.request import FinishReason
from kvctl.core.step import ModelRunnerOutput, SchedulerOutput
from kvctl.errors import InvalidRequest, InvariantViolation
from tests.support.schedulers import make_request, make_scheduler


class CountingRunner:
    """Keeps tokens as a real runner does, from the plan alone, and 'samples' how many there are."""

    def __init__(self) -> None:
        self.known: dict[str, list[int]] = {}
        self.done: dict[str, int] = {}
        self.plans: list[SchedulerOutput] = []

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        self.plans.append(plan)
        for request_id in (*plan.finished_request_ids, *plan.preempted_request_ids):
            del self.known[request_id], self.done[request_id]
        for new in plan.new_requests:
            self.known[new.request_id] = list(new.token_ids)
            self.done[new.request_id] = new.num_computed_tokens
        sampled: list[int | None] = []
        for request_id, count in zip(plan.request_ids, plan.num_scheduled_tokens, strict=True):
            self.done[request_id] += count
            tokens = self.known[request_id]
            if self.done[request_id] == len(tokens):
                tokens.append(len(tokens))
                sampled.append(tokens[-1])
            else:
                sampled.append(None)
        return ModelRunnerOutput(sampled)


class Ticks:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


class HandClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_step_tells_tokens_admissions_and_times() -> None:
    core = EngineCore(make_scheduler(), CountingRunner(), Ticks())
    core.add(make_request("a", 5, max_tokens=2))
    first = core.step()
    assert [o.new_token_ids for o in first.outputs] == [[5]]
    assert [(e.request_id, e.at_s) for e in first.admissions] == [("a", 2.0)]
    assert (first.stats.step_duration_s, first.stats.schedule_duration_s, first.at_s) == (2.0, 1.0, 3.0)
    assert core.step().outputs[0].finish_reason is FinishReason.LENGTH
    assert not core.has_work()


def test_a_request_that_can_never_run_is_refused_and_disturbs_nobody() -> None:
    core = EngineCore(make_scheduler(num_blocks=5), CountingRunner(), Ticks())
    core.add(make_request("fits", 4, max_tokens=1))
    with pytest.raises(InvalidRequest, match="400 tokens"):
        core.add(make_request("too long", 400))
    assert [o.request_id for o in core.step().outputs] == ["fits"]
    assert not core.has_work()


def test_the_runner_can_follow_every_plan_under_pressure() -> None:
    runner = CountingRunner()
    core = EngineCore(make_scheduler(num_blocks=8, max_num_batched_tokens=16), runner, Ticks())
    for name in "abcde":
        core.add(make_request(name, 9, max_tokens=12))
    generated: dict[str, list[int]] = {}
    preemptions = 0
    while core.has_work():
        result = core.step()
        preemptions += result.stats.num_preemptions
        for output in result.outputs:
            generated.setdefault(output.request_id, []).extend(output.new_token_ids)
    assert preemptions > 0
    assert generated == {name: list(range(9, 21)) for name in "abcde"}


def test_an_abort_takes_effect_before_the_next_step() -> None:
    core = EngineCore(make_scheduler(), CountingRunner(), Ticks())
    core.add(make_request("a", 5))
    core.add(make_request("b", 5))
    core.step()
    core.abort("a")
    core.abort("a")
    assert [o.request_id for o in core.step().outputs] == ["b"]


def test_a_stuck_queue_is_a_bug_and_said_so() -> None:
    scheduler = make_scheduler(num_blocks=5)
    core = EngineCore(scheduler, CountingRunner(), Ticks())
    core.add(make_request("a", 12, max_tokens=1))
    scheduler.kv_cache_manager.pool.allocate(3)  # somebody leaks blocks
    with pytest.raises(InvariantViolation, match="cannot start although nothing runs"):
        core.step()


# ---- two steps in flight ----


def serve(core: EngineCore, num_requests: int, seed: int, aborts: bool = True) -> dict[str, list[int]]:
    """Requests of random lengths arriving while others run; some are aborted. Request id -> tokens."""
    rng = random.Random(seed)
    generated: dict[str, list[int]] = {}
    ended: set[str] = set()
    arrived = 0
    while arrived < num_requests or core.has_work():
        if arrived < num_requests and rng.random() < 0.5:
            generated[f"r{arrived}"] = []
            core.add(
                make_request(f"r{arrived}", rng.randint(1, 30), max_tokens=rng.randint(1, 20), priority=arrived % 3)
            )
            arrived += 1
        if aborts and rng.random() < 0.03 and core.scheduler.requests:
            name = rng.choice(sorted(core.scheduler.requests))
            core.abort(name)
            ended.add(name)
        for output in core.step().outputs:
            assert output.request_id not in ended, "nothing follows the end of a request"
            generated[output.request_id] += output.new_token_ids
            if output.finish_reason:
                ended.add(output.request_id)
        core.scheduler.check_integrity()
    core.close()
    pool = core.scheduler.kv_cache_manager.pool
    assert ended == set(generated) and pool.num_free_blocks == pool.num_usable_blocks
    return generated


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("num_blocks", [20, 200])
@pytest.mark.parametrize("seed", range(6))
def test_overlapped_steps_give_the_same_tokens(policy: str, num_blocks: int, seed: int) -> None:
    def core(kind: type[EngineCore]) -> EngineCore:
        options = {"max_num_batched_tokens": 24, "max_num_seqs": 6, "long_prefill_token_threshold": 5 * (seed % 2)}
        scheduler = make_scheduler(num_blocks, policy=policy, **options)
        return kind(scheduler, CountingRunner(), Ticks())

    assert serve(core(PipelinedEngineCore), 40, seed, aborts=False) == serve(core(EngineCore), 40, seed, aborts=False)
    for name, tokens in serve(core(PipelinedEngineCore), 40, seed).items():
        first = tokens[0] if tokens else 0
        assert tokens == list(range(first, first + len(tokens))), name


def test_the_next_step_is_started_before_the_last_one_is_told() -> None:
    runner = CountingRunner()
    core = PipelinedEngineCore(make_scheduler(), runner, Ticks())
    core.add(make_request("a", 5, max_tokens=3))
    assert core.step().outputs == []  # step 1 is in flight
    assert [o.new_token_ids for o in core.step().outputs] == [[5]]  # step 2 was planned without knowing token 5
    assert len(core._in_flight) == 1
    assert [o.new_token_ids for o in core.step().outputs] == [[6]]
    last = core.step()
    assert last.outputs[0].finish_reason is FinishReason.LENGTH and not core.has_work()
    assert len(runner.plans) == 3  # nothing was computed beyond max_tokens
    core.close()


def test_the_duration_of_an_overlapped_step_is_its_own() -> None:
    """A prompt that takes 10 s and is all there is: not the instant in which it was handed over."""
    clock = HandClock()

    class Slow(CountingRunner):
        def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
            clock.now += 10.0
            return super().execute(plan)

    core = PipelinedEngineCore(make_scheduler(), Slow(), clock)
    for name in ("a", "b"):
        core.add(make_request(name, 5, max_tokens=1))
        steps = []
        while core.has_work():
            steps.append(core.step().stats)
        assert [step.step_duration_s for step in steps] == [0.0, 10.0]
        assert sum(step.num_scheduled_tokens for step in steps) == 5
        clock.now += 1000.0
    core.add(make_request("c", 5, max_tokens=3))
    durations = []
    while core.has_work():
        durations.append(core.step().stats.step_duration_s)
    assert sum(durations) == 30.0 and durations[0] == 0.0
    core.close()


def test_an_interruption_while_a_step_is_waited_for_does_not_lose_it() -> None:
    core = PipelinedEngineCore(make_scheduler(), CountingRunner(), Ticks())
    core.add(make_request("a", 5, max_tokens=3))
    core.step()
    real = core._in_flight[0][1].result

    def interrupted() -> ModelRunnerOutput:
        core._in_flight[0][1].result = real  # type: ignore[method-assign]
        raise KeyboardInterrupt

    core._in_flight[0][1].result = interrupted  # type: ignore[method-assign,assignment]
    with pytest.raises(KeyboardInterrupt):
        core.step()
    core.abort("a")
    while core.has_work():
        assert core.step().outputs == []
    core.add(make_request("a", 5, max_tokens=1))  # nothing holds its id any more
    assert [o.new_token_ids for _ in range(2) for o in core.step().outputs] == [[5]]
    core.close()


def test_what_a_step_in_flight_samples_for_an_ended_request_is_dropped() -> None:
    core = PipelinedEngineCore(make_scheduler(), CountingRunner(), Ticks())
    request = make_request("a", 5, max_tokens=50)
    request.eos_token_ids = frozenset({6})
    core.add(request)
    told = [output for _ in range(6) for output in core.step().outputs]
    assert [o.new_token_ids for o in told] == [[5], [6]] and told[-1].finish_reason is FinishReason.STOP
    core.add(make_request("a", 5, max_tokens=1))  # the id is free again
    assert [o.new_token_ids for _ in range(2) for o in core.step().outputs] == [[5]]
    core.close()


def test_an_id_stays_taken_while_a_step_in_flight_samples_for_it() -> None:
    core = PipelinedEngineCore(make_scheduler(), CountingRunner(), Ticks())
    core.add(make_request("a", 5, max_tokens=50))
    core.step()
    core.abort("a")
    with pytest.raises(InvalidRequest, match="in use"):
        core.add(make_request("a", 5, max_tokens=50))
    assert [o for _ in range(2) for o in core.step().outputs] == []
    core.add(make_request("a", 5, max_tokens=50))
    core.close()


@pytest.mark.parametrize("kind", [EngineCore, PipelinedEngineCore])
@pytest.mark.parametrize("max_tokens", [8, 9])
def test_a_finished_answer_is_found_up_to_its_last_full_block(kind: type[EngineCore], max_tokens: int) -> None:
    """Overlapped, the token that fills a block is scheduled before it is known."""
    core = kind(make_scheduler(), CountingRunner(), Ticks())
    core.add(make_request("a", list(range(4)), max_tokens=max_tokens))
    answer = [t for _ in range(20) if core.has_work() for o in core.step().outputs for t in o.new_token_ids]
    follow_up = make_request("b", [*range(4), *answer, 7])
    # Of 12 tokens the last one was sampled, never computed; of 13 the first 12 fill three blocks of 4.
    expected = 8 if max_tokens == 8 else 12
    assert core.scheduler.kv_cache_manager.find_cached_prefix(follow_up).num_tokens == expected
    core.close()


def test_an_error_of_the_runner_is_not_swallowed() -> None:
    class Failing:
        def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
            raise RuntimeError("the device is gone")

    core = PipelinedEngineCore(make_scheduler(), Failing(), Ticks())
    core.add(make_request("a", 5, max_tokens=5))
    core.step()
    with pytest.raises(RuntimeError, match="the device is gone"):
        core.step()
    core.close()
