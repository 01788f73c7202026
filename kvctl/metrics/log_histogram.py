"""A histogram of durations in constant memory: buckets 0.05 % wide, for samples too many to keep (gaps between events).

A stream of 25,000 events/s would fill memory within minutes; here it costs one counter per distinct bucket. Values
are known to 0.025 %; the sum, and so the mean, is exact. Zero has a bucket of its own (events of one read).
Pure: no clock. Floor 0.
"""

import math
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator

PER_E = 2000  # buckets per factor e: a bucket is 1/2000 wide
UNIT_S = 1e-6
MAX_BUCKET = 65_535  # fits array('H'); e**(65535/2000) us is five years
_LOG = math.log


def gap_bucket(duration_s: float) -> int:
    """The bucket of a duration: 0 for at most 1 us, else 1 + floor(2000 ln(duration / 1 us))."""
    if duration_s <= UNIT_S:
        return 0
    return min(1 + int(_LOG(duration_s / UNIT_S) * PER_E), MAX_BUCKET)


def bucket_value_s(bucket: int) -> float:
    """The duration that stands for a bucket: its middle."""
    return 0.0 if bucket == 0 else math.exp((bucket - 0.5) / PER_E) * UNIT_S


class LogHistogram:
    """Durations by bucket. Adding whole arrays of buckets is what makes it cheap."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self.count = 0
        self.sum_s = 0.0

    def add_buckets(self, buckets: "array[int]", sum_s: float) -> None:
        """Add many durations at once, given as buckets and their exact sum."""
        self._counts.update(buckets)
        self.count += len(buckets)
        self.sum_s += sum_s

    def add(self, durations_s: Iterable[float]) -> None:
        """Add durations."""
        values = list(durations_s)
        self.add_buckets(array("H", map(gap_bucket, values)), sum(values))

    def merge(self, other: "LogHistogram") -> None:
        """Add what another histogram holds."""
        self._counts.update(other._counts)
        self.count += other.count
        self.sum_s += other.sum_s

    @property
    def mean_s(self) -> float | None:
        """The exact mean; None without samples."""
        return self.sum_s / self.count if self.count else None

    def percentile_s(self, percent: float) -> float | None:
        """The percentile, interpolated between neighbours as `summary.percentile` does; None without samples."""
        if not self.count:
            return None
        rank = (self.count - 1) * percent / 100
        low_rank = math.floor(rank)
        low_s = high_s = 0.0
        seen = 0
        for bucket in sorted(self._counts):
            before, seen = seen, seen + self._counts[bucket]
            if before <= low_rank < seen:
                low_s = high_s = bucket_value_s(bucket)
            if seen > low_rank + 1 or seen == self.count:
                if before <= low_rank + 1 < seen:
                    high_s = bucket_value_s(bucket)
                break
        return low_s + (high_s - low_s) * (rank - low_rank)

    def cumulative(self) -> Iterator[tuple[float, int]]:
        """Yield (duration, samples up to it) by rising duration."""
        seen = 0
        for bucket in sorted(self._counts):
            seen += self._counts[bucket]
            yield bucket_value_s(bucket), seen
