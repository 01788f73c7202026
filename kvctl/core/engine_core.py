"""The step loop: schedule, execute, update. Knows no process, no socket and no torch.

`ModelRunner` and `Clock` are Protocols: the same loop runs a model, a simulator or a test's fake. Floor 0.
"""

from typing import Protocol

from kvctl.core.step import ModelRunnerOutput, SchedulerOutput


class ModelRunner(Protocol):
    """Computes one step's plan."""

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Compute the scheduled tokens of each request and sample where a request's last token was reached."""
        ...


class Clock(Protocol):
    """Monotonic seconds."""

    def __call__(self) -> float:
        """Seconds since an arbitrary start; never goes back."""
        ...
