"""When requests are due in an open loop: seeded, drawn beforehand, independent of how the server answers.

Pure: seconds from the start of the run; no clock. Gaps of a constant, Poisson or gamma process, on/off bursts, and
rates that change in steps or along a ramp; for a changing rate the process is drawn at rate 1 and its time warped, so
that shape and rate stay apart. Shared by bench and simulator. Floor 0.
"""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from kvctl.errors import ConfigError
from kvctl.units import parse_seconds

Process = Literal["constant", "poisson", "gamma"]


@dataclass(frozen=True)
class RateSegment:
    """A stretch of time over which the rate goes evenly from one value to another (requests/s)."""

    start_per_s: float
    end_per_s: float
    duration_s: float  # inf for the last

    def __post_init__(self) -> None:
        rates = (self.start_per_s, self.end_per_s)
        if not all(math.isfinite(rate) and rate >= 0 for rate in rates) or not self.duration_s > 0:
            raise ConfigError(
                f"no such rate: {self.start_per_s:g} to {self.end_per_s:g} for {self.duration_s:g} s",
                hint="Give finite rates of 0 or more, over a time above 0.",
            )

    @property
    def expected(self) -> float:
        """Arrivals expected within the segment."""
        mean = (self.start_per_s + self.end_per_s) / 2
        return mean * self.duration_s if mean else 0.0

    def time_of(self, count: float) -> float:
        """The moment within the segment at which `count` arrivals are expected to have come."""
        if not math.isfinite(self.duration_s) or self.start_per_s == self.end_per_s:
            return count / self.start_per_s
        slope = (self.end_per_s - self.start_per_s) / self.duration_s
        root = math.sqrt(max(0.0, self.start_per_s**2 + 2 * slope * count))
        return 2 * count / (self.start_per_s + root)  # the stable form of (root - start) / slope


@dataclass(frozen=True)
class ArrivalSpec:
    """A process and its rate over time. `burstiness` is the gamma shape: 1 is Poisson, below 1 burstier.

    Source: gaps ~ Gamma(shape, 1 / (rate * shape)), the parametrisation that other load generators use too, so that
    one `--burstiness` means the same everywhere.
    """

    segments: tuple[RateSegment, ...]
    process: Process = "poisson"
    burstiness: float = 1.0
    repeat: bool = False  # the segments come again and again (on/off bursts)

    def __post_init__(self) -> None:
        if not self.segments or not any(segment.expected for segment in self.segments):
            raise ConfigError("the rate is 0 throughout: no request would ever be due", hint="Give --rate above 0.")
        if not (math.isfinite(self.burstiness) and self.burstiness > 0):
            raise ConfigError(f"burstiness {self.burstiness:g} is not above 0", hint="1 is Poisson; below 1 burstier.")

    @classmethod
    def steady(cls, rate_per_s: float, process: Process = "poisson", burstiness: float = 1.0) -> "ArrivalSpec":
        """One rate for as long as it takes."""
        return cls((RateSegment(rate_per_s, rate_per_s, math.inf),), process, burstiness)

    @classmethod
    def parse(cls, text: str, process: Process = "poisson", burstiness: float = 1.0) -> "ArrivalSpec":
        """Read '5', '1@10s,2@10s,4' (steps), '1..20@60s' (a ramp) or '20@2s,0@8s,...' (again and again).

        Raises:
            ConfigError: none of these.
        """
        hint = "Write 5, 1@10s,2@10s (steps), 1..20@60s (a ramp) or 20@2s,0@8s,... (bursts)."
        pieces = [piece.strip() for piece in text.split(",")]
        repeat = len(pieces) > 1 and pieces[-1] == "..."
        segments = []
        for i, piece in enumerate(pieces[:-1] if repeat else pieces):
            rates, has_duration, duration = piece.partition("@")
            start, is_ramp, end = rates.partition("..")
            is_last = i == len(pieces) - 1
            if not has_duration and (is_ramp or not is_last):
                raise ConfigError(f"{piece!r} does not say for how long", hint=hint)
            try:
                first = float(start)
                last = float(end) if is_ramp else first
            except ValueError:
                raise ConfigError(f"{piece!r} is no rate", hint=hint) from None
            segments.append(RateSegment(first, last, parse_seconds(duration) if has_duration else math.inf))
        return cls(tuple(segments), process, burstiness, repeat)

    def times_s(self, seed: int) -> Iterator[float]:
        """Yield the due times in order; endless where the last rate is."""
        rng = random.Random(f"arrivals-{seed}")
        position = 0.0 if self.process == "constant" else self._gap(rng)  # in expected arrivals
        offset_s = consumed = 0.0
        while True:
            for segment in self.segments:
                expected = segment.expected
                while position < consumed + expected:
                    yield offset_s + segment.time_of(position - consumed)
                    position += self._gap(rng)
                consumed += expected
                offset_s += segment.duration_s
            if not self.repeat:
                return

    def _gap(self, rng: random.Random) -> float:
        if self.process == "constant":
            return 1.0
        if self.process == "poisson":
            return rng.expovariate(1.0)
        return rng.gammavariate(self.burstiness, 1 / self.burstiness)

    @property
    def end_s(self) -> float:
        """When the last segment ends; infinite where it does not."""
        return math.inf if self.repeat else sum(segment.duration_s for segment in self.segments)

    def as_json(self) -> dict[str, object]:
        """The specification as a result tells it."""
        return {
            "process": self.process,
            "burstiness": self.burstiness,
            "repeat": self.repeat,
            "segments": [
                [s.start_per_s, s.end_per_s, s.duration_s if math.isfinite(s.duration_s) else None]
                for s in self.segments
            ],
        }
