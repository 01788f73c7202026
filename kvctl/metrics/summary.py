"""Percentiles, goodput under a service level objective, and how sure one can be of both. Pure Python, no clock.

Percentiles interpolate linearly between order statistics (numpy's default). A percentile is refused (None) when
fewer than 1 / (1 - p) samples stand behind it, for then it is only the maximum under another name. Intervals:
Wilson's for shares, binomial order statistics for percentiles, bootstrap for the ratio of two runs. Floor 0.
"""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvctl.errors import ConfigError
from kvctl.metrics.log_histogram import LogHistogram
from kvctl.units import parse_seconds

PERCENTS = (50, 90, 95, 99)
_Z_95 = 1.959963984540054  # two-sided 95 % quantile of the normal distribution
SLO_METRICS = ("ttft", "tpot", "e2e", "ttfo", "max_gap")


def percentile(sorted_values: Sequence[float], percent: float) -> float:
    """The percentile of values in rising order, at least one; `percent` in 0..100."""
    rank = (len(sorted_values) - 1) * percent / 100
    low = math.floor(rank)
    high = min(low + 1, len(sorted_values) - 1)
    return sorted_values[low] + (sorted_values[high] - sorted_values[low]) * (rank - low)


def samples_needed(percent: float) -> int:
    """How many samples a percentile needs to be more than the maximum: 100 for p99, 20 for p95, 1 up to p50."""
    return 1 if percent <= 50 else math.ceil(round(100 / (100 - percent), 6))


@dataclass(frozen=True)
class LatencySummary:
    """What is said of one latency: mean, standard deviation, percentiles (None: too few samples), n. Seconds."""

    n: int
    mean_s: float | None = None
    std_s: float | None = None
    min_s: float | None = None
    max_s: float | None = None
    percentiles_s: Mapping[int, float | None] | None = None

    @classmethod
    def of(cls, values_s: Sequence[float]) -> "LatencySummary":
        """Summarise samples in any order."""
        n = len(values_s)
        if n == 0:
            return cls(0)
        ordered = sorted(values_s)
        mean_s = math.fsum(ordered) / n
        std_s = math.sqrt(math.fsum((value - mean_s) ** 2 for value in ordered) / n)
        percentiles = {p: percentile(ordered, p) if n >= samples_needed(p) else None for p in PERCENTS}
        return cls(n, mean_s, std_s, ordered[0], ordered[-1], percentiles)

    @classmethod
    def of_histogram(cls, histogram: LogHistogram) -> "LatencySummary":
        """Summarise a histogram; the standard deviation is not known."""
        n = histogram.count
        if n == 0:
            return cls(0)
        percentiles = {p: histogram.percentile_s(p) if n >= samples_needed(p) else None for p in PERCENTS}
        low, high = histogram.percentile_s(0), histogram.percentile_s(100)
        return cls(n, histogram.mean_s, None, low, high, percentiles)

    def percentile_s(self, percent: int) -> float | None:
        """One of the percentiles; None with too few samples."""
        return None if self.percentiles_s is None else self.percentiles_s.get(percent)

    def as_json_ms(self) -> dict[str, float | int | None]:
        """{"mean", "std", "min", "max", "p50", "p90", "p95", "p99", "n"} in milliseconds."""
        result: dict[str, float | int | None] = {
            name: to_ms(value)
            for name, value in (("mean", self.mean_s), ("std", self.std_s), ("min", self.min_s), ("max", self.max_s))
        }
        for percent in PERCENTS:
            result[f"p{percent}"] = to_ms(self.percentile_s(percent))
        result["n"] = self.n
        return result


def to_ms(value_s: float | None) -> float | None:
    """Seconds as milliseconds, to a tenth of a microsecond."""
    return None if value_s is None else round(value_s * 1e3, 4)


def wilson_interval(num_good: int, num_all: int) -> tuple[float, float] | None:
    """The 95 % interval of a share; None when there was nothing to count.

    Source: E. B. Wilson, "Probable inference, the law of succession, and statistical inference", JASA 22 (1927).
    """
    if num_all == 0:
        return None
    share = num_good / num_all
    z2 = _Z_95 * _Z_95
    centre = (share + z2 / (2 * num_all)) / (1 + z2 / num_all)
    half = _Z_95 / (1 + z2 / num_all) * math.sqrt(share * (1 - share) / num_all + z2 / (4 * num_all**2))
    low = 0.0 if num_good == 0 else max(0.0, centre - half)
    high = 1.0 if num_good == num_all else min(1.0, centre + half)
    return low, high


def percentile_interval(sorted_values: Sequence[float], percent: float) -> tuple[float, float] | None:
    """A distribution-free interval of at least 95 % for a percentile; None when too few samples allow none.

    The number of samples below the percentile is binomial, so two order statistics bracket it.
    Source: Conover, "Practical Nonparametric Statistics", 3rd ed., section 3.2.
    """
    n, p = len(sorted_values), percent / 100
    if n == 0 or not 0 < p < 1:
        return None
    low = _binomial_quantile(n, p, 0.025)
    high = _binomial_quantile(n, p, 0.975) + 1
    if low < 1 or high > n:
        return None
    return sorted_values[low - 1], sorted_values[high - 1]


def _binomial_quantile(n: int, p: float, probability: float) -> int:
    """The largest k with P(X < k) <= probability (low side), or the smallest k with P(X <= k) >= it (high side)."""
    log_p, log_q = math.log(p), math.log1p(-p)
    total, log_n = 0.0, math.lgamma(n + 1)
    for k in range(n + 1):
        total += math.exp(log_n - math.lgamma(k + 1) - math.lgamma(n - k + 1) + k * log_p + (n - k) * log_q)
        if total > probability if probability < 0.5 else total >= probability:
            return k
    return n


def bootstrap_ratios(
    before: Sequence[float],
    after: Sequence[float],
    percents: Sequence[float | None],
    *,
    seed: int = 0,
    rounds: int = 500,
) -> list[tuple[float, float, float] | None]:
    """(after / before, low, high) for each percentile (None: the mean): the ratio and its 95 % bootstrap interval.

    At most 2000 values of each side are resampled, so the cost is bounded. None where a side is empty or zero.
    """
    if not before or not after:
        return [None] * len(percents)

    def statistics(values: Sequence[float]) -> list[float]:
        ordered = sorted(values)
        mean = math.fsum(ordered) / len(ordered)
        return [mean if percent is None else percentile(ordered, percent) for percent in percents]

    rng = random.Random(seed)
    draws: list[list[float]] = [[] for _ in percents]
    for _ in range(rounds):
        old = statistics(rng.choices(before, k=min(len(before), 2000)))
        new = statistics(rng.choices(after, k=min(len(after), 2000)))
        for ratios, base, value in zip(draws, old, new, strict=True):
            if base > 0:
                ratios.append(value / base)
    found: list[tuple[float, float, float] | None] = []
    for ratios, base, value in zip(draws, statistics(before), statistics(after), strict=True):
        if base <= 0 or not ratios:
            found.append(None)
            continue
        ratios.sort()
        found.append((value / base, percentile(ratios, 2.5), percentile(ratios, 97.5)))
    return found


def sketch(values: Sequence[float], max_points: int = 2000) -> list[float]:
    """At most `max_points` values in rising order that keep the distribution: all, or evenly spaced percentiles."""
    ordered = sorted(values)
    if len(ordered) <= max_points:
        return ordered
    return [percentile(ordered, 100 * (i + 0.5) / max_points) for i in range(max_points)]


@dataclass(frozen=True)
class Slo:
    """Limits that one request must keep, in seconds by metric name. A failed request misses every one."""

    limits_s: Mapping[str, float]

    @classmethod
    def parse(cls, text: str) -> "Slo":
        """Read 'ttft=500ms,tpot=50ms,e2e=5s'; also the separator ':' and the names `e2el` and `itl` of other tools.

        Raises:
            ConfigError: an unknown metric or no duration.
        """
        limits: dict[str, float] = {}
        for part in filter(None, (piece.strip() for piece in text.replace(" ", ",").split(","))):
            name, separator, value = part.replace(":", "=").partition("=")
            name = {"e2el": "e2e", "itl": "tpot", "ttfot": "ttfo"}.get(name.strip().lower(), name.strip().lower())
            if not separator or name not in SLO_METRICS:
                raise ConfigError(f"{part!r} is no limit", hint="Write --slo ttft=500ms,tpot=50ms[,e2e=5s].")
            limits[name] = parse_seconds(value)
        if not limits:
            raise ConfigError("the SLO is empty", hint="Write --slo ttft=500ms,tpot=50ms[,e2e=5s].")
        return cls(limits)

    def is_met(self, values_s: Mapping[str, float | None]) -> bool:
        """Whether a completed request keeps all limits.

        One token has no TPOT and no gap, so it keeps those limits; an answer without any token keeps no other one.
        """
        for name, limit_s in self.limits_s.items():
            value_s = values_s.get(name)
            if value_s is None:
                if name not in ("tpot", "max_gap"):
                    return False
            elif value_s > limit_s:
                return False
        return True

    def __str__(self) -> str:
        return ",".join(f"{name}={limit * 1e3:g}ms" for name, limit in self.limits_s.items())


@dataclass(frozen=True)
class Goodput:
    """How many requests kept the SLO. `num_all` counts failed and never-sent ones too."""

    num_good: int
    num_all: int
    duration_s: float
    slo: Slo

    def as_json(self) -> dict[str, object]:
        """The share with its 95 % Wilson interval, and good requests per second."""
        interval = wilson_interval(self.num_good, self.num_all)
        return {
            "slo": {name: round(limit * 1e3, 6) for name, limit in self.slo.limits_s.items()},
            "good": self.num_good,
            "all": self.num_all,
            "share": self.num_good / self.num_all if self.num_all else None,
            "ci95": list(interval) if interval else None,
            "requests_per_s": self.num_good / self.duration_s if self.duration_s > 0 else None,
        }
