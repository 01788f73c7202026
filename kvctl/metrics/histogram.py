"""Prometheus histograms: the difference of two, their quantiles and means, and how exact each is.

Knows no names and no servers. Bounds are what the page said, in rising order; counts are cumulative. A quantile
is computed as Prometheus' `histogram_quantile` does and carries the bracket it lies in, because the interpolated
point alone pretends to an accuracy that the buckets do not have. No observation means None, never 0. Floor 0.

Source: `histogram_quantile` in https://prometheus.io/docs/prometheus/latest/querying/functions/ .
"""

import math
from bisect import bisect_left
from dataclasses import dataclass
from typing import NamedTuple


class Quantile(NamedTuple):
    """A quantile: Prometheus' interpolated point, and the bucket [low, high] that holds the true value.

    `high` is infinite where the value lies above the last finite bound; `low` is 0 in the first bucket
    (minus infinity where that bound is not positive).
    """

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Histogram:
    """Cumulative counts by upper bound, with the exact sum and count where the page gave them."""

    bounds: tuple[float, ...]
    cumulative: tuple[float, ...]
    sum: float | None
    count: float | None

    @property
    def mean(self) -> float | None:
        """The exact mean of the observations; None where there is none."""
        if self.sum is None or self.count is None or self.count <= 0:
            return None
        return self.sum / self.count

    def since(self, earlier: "Histogram | None") -> "Histogram | None":
        """Return what was observed since `earlier`; None where the two cannot be subtracted.

        A count that went down is a restart: everything in `self` came after it, so `self` is the answer,
        as Prometheus takes it. Different bounds cannot be compared: None.
        """
        if earlier is None:
            return None
        if self.bounds != earlier.bounds or self.count is None or earlier.count is None:
            return None
        if self.count < earlier.count:
            return self
        counts = tuple(max(0.0, now - before) for now, before in zip(self.cumulative, earlier.cumulative, strict=True))
        total = None if self.sum is None or earlier.sum is None else self.sum - earlier.sum
        return Histogram(self.bounds, counts, total, self.count - earlier.count)

    def plus(self, other: "Histogram") -> "Histogram | None":
        """Return both together (two windows, two engines); None where the bounds differ."""
        if self.bounds != other.bounds:
            return None
        counts = tuple(a + b for a, b in zip(self.cumulative, other.cumulative, strict=True))
        return Histogram(self.bounds, counts, _add(self.sum, other.sum), _add(self.count, other.count))

    def quantile(self, q: float) -> Quantile | None:
        """Return the q-quantile as `histogram_quantile` would; None where that is NaN (or q is not in 0..1)."""
        if not 0 <= q <= 1 or len(self.bounds) < 2 or self.bounds[-1] != math.inf:
            return None
        counts = _monotonic(self.cumulative)
        if counts[-1] <= 0:
            return None
        rank = q * counts[-1]
        index = bisect_left(counts, rank, 0, len(counts) - 1)
        if index == len(counts) - 1:
            return Quantile(self.bounds[-2], self.bounds[-2], math.inf)
        high = self.bounds[index]
        if index == 0:
            if high <= 0:
                return Quantile(high, -math.inf, high)
            low, before = 0.0, 0.0
        else:
            low, before = self.bounds[index - 1], counts[index - 1]
        inside = counts[index] - before
        share = (rank - before) / inside if inside > 0 else 0.0
        return Quantile(low + (high - low) * share, low, high)

    def top_bucket(self) -> tuple[float, float, float] | None:
        """Return (low, high, share of all observations) of the highest bucket that holds any; None if empty."""
        counts = _monotonic(self.cumulative)
        if not counts or counts[-1] <= 0:
            return None
        index = bisect_left(counts, counts[-1])
        before = counts[index - 1] if index else 0.0
        low = self.bounds[index - 1] if index else 0.0
        return low, self.bounds[index], (counts[index] - before) / counts[-1]

    def top_bucket_mean(self) -> float | None:
        """Estimate the mean of the observations in the highest used bucket: all others stand at their middles."""
        top = self.top_bucket()
        if top is None or self.sum is None or math.isinf(top[1]):
            return None
        counts = _monotonic(self.cumulative)
        others, low, before = 0.0, 0.0, 0.0
        for bound, count in zip(self.bounds, counts, strict=True):
            if bound >= top[1]:
                break
            others += (count - before) * (low + bound) / 2
            low, before = bound, count
        return min(top[1], max(top[0], (self.sum - others) / (counts[-1] - before)))

    def share_above(self, bound: float) -> float | None:
        """Return the share of observations above the first bucket bound that is >= `bound`; None if empty."""
        counts = _monotonic(self.cumulative)
        if not counts or counts[-1] <= 0:
            return None
        index = min(bisect_left(self.bounds, bound), len(counts) - 1)
        return 1.0 - counts[index] / counts[-1]


def _add(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a + b


def _monotonic(cumulative: tuple[float, ...]) -> list[float]:
    """Raise each count to the highest before it: concurrent writes can make a page contradict itself."""
    counts: list[float] = []
    highest = 0.0
    for count in cumulative:
        highest = max(highest, count)
        counts.append(highest)
    return counts
