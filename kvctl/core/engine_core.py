"""The step loop: schedule, execute, update. Knows no process, no socket and no torch.

`ModelRunner` and `Clock` are Protocols: the same loop runs a model, a simulator or a test's fake. Floor 0.
"""

from typing import Protocol

from kvctl.core.request import Request
from kvctl.core.scheduler import Scheduler
from kvctl.core.step import AdmissionEvent, EngineOutput, ModelRunnerOutput, SchedulerOutput, StepResult
from kvctl.errors import InvariantViolation


class ModelRunner(Protocol):
    """Computes one step's plan."""

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Compute the scheduled tokens of each request and sample where its last token is reached."""
        ...


class Clock(Protocol):
    """Monotonic seconds."""

    def __call__(self) -> float:
        """Seconds since an arbitrary start; never goes back."""
        ...


class EngineCore:
    """One engine: a scheduler, a runner and the loop between them, one step after the other."""

    def __init__(self, scheduler: Scheduler, runner: ModelRunner, clock: Clock) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self._clock = clock

    def close(self) -> None:
        """Let go of what the core itself started; nothing here."""

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            InvalidRequest: it can never run; nothing was queued.
        """
        self.scheduler.add(request)

    def abort(self, request_id: str) -> None:
        """End a request without further output; unknown and finished ids are fine. Its blocks are free at once."""
        self.scheduler.abort(request_id)

    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return self.scheduler.has_work

    def step(self) -> StepResult:
        """Run one step and tell what came of it.

        Raises:
            InvariantViolation: requests wait, none runs, and still none can be admitted.
        """
        started_s = self._clock()
        outputs: list[EngineOutput] | None = None
        plan = self.scheduler.schedule()
        scheduled_s = self._clock()
        if plan.is_empty:
            self._check_not_stuck()
        else:
            outputs = self.scheduler.update(plan, self.runner.execute(plan))
        return self._result(outputs, plan, started_s, scheduled_s, started_s)

    def _check_not_stuck(self) -> None:
        if self.scheduler.waiting and not self.scheduler.running:
            head = self.scheduler.waiting.peek()
            raise InvariantViolation(f"{head} cannot start although nothing runs: {head.waiting_reason}")

    def _result(
        self,
        outputs: list[EngineOutput] | None,
        plan: SchedulerOutput,
        started_s: float,
        scheduled_s: float,
        busy_since_s: float,
    ) -> StepResult:
        """Tell of `plan`, and of the step that has ended, if one has (`outputs`): it took since `busy_since_s`."""
        ended_s = self._clock()
        stats = self.scheduler.take_stats()
        stats.schedule_duration_s = scheduled_s - started_s
        if outputs is not None:
            stats.step_duration_s = ended_s - busy_since_s
        admissions = [AdmissionEvent(new.request_id, scheduled_s) for new in plan.new_requests]
        return StepResult(outputs=outputs or [], stats=stats, at_s=ended_s, admissions=admissions)
