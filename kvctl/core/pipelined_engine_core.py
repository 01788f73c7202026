"""The step loop with two steps in flight: step n+1 is planned and handed over while step n still runs.

What is saved is the time between steps: planning, bookkeeping and telling outputs happen while the device works. The
runner executes in order, on a thread of this core's; it knows the tokens it sampled, the scheduler learns of them
one step later (see `scheduler`). Outputs are the same tokens as `EngineCore`'s. Knows no torch. Floor 0.
"""

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

from kvctl.core.engine_core import Clock, EngineCore, ModelRunner
from kvctl.core.scheduler import Scheduler
from kvctl.core.step import EngineOutput, ModelRunnerOutput, SchedulerOutput, StepResult

MAX_STEPS_IN_FLIGHT = 2


class PipelinedEngineCore(EngineCore):
    """An EngineCore whose `step` returns the outputs of the oldest step in flight, having started a younger one."""

    def __init__(self, scheduler: Scheduler, runner: ModelRunner, clock: Clock) -> None:
        super().__init__(scheduler, runner, clock)
        self._thread = ThreadPoolExecutor(1, "model-runner")
        self._in_flight: deque[tuple[SchedulerOutput, Future[ModelRunnerOutput], float]] = deque()  # with its start
        self._last_end_s = 0.0  # of the step told last

    def close(self) -> None:
        """Wait for the steps in flight and end the thread."""
        self._thread.shutdown()

    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._in_flight) or super().has_work()

    def step(self) -> StepResult:
        """Plan and start a step if there is one to plan, then take in the oldest one if two are in flight.

        Raises:
            InvariantViolation: requests wait, none runs, and still none can be admitted.
        """
        started_s = self._clock()
        outputs: list[EngineOutput] | None = None
        busy_since_s = started_s
        plan = self.scheduler.schedule()
        scheduled_s = self._clock()
        if not plan.is_empty:
            self._in_flight.append((plan, self._thread.submit(self.runner.execute, plan), started_s))
        elif not self._in_flight:
            self._check_not_stuck()
        if self._in_flight and (plan.is_empty or len(self._in_flight) == MAX_STEPS_IN_FLIGHT):
            oldest, future, oldest_started_s = self._in_flight[0]
            result = future.result()
            self._in_flight.popleft()  # not before: a Ctrl-C while waiting must not lose the step
            outputs = self.scheduler.update(oldest, result)
            busy_since_s = max(oldest_started_s, self._last_end_s)  # it ran after the one before had ended
        told = self._result(outputs, plan, started_s, scheduled_s, busy_since_s)
        if outputs is not None:
            self._last_end_s = told.at_s
        return told
