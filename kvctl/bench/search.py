"""Several runs of one server: sweeps over a load, the highest rate that keeps an SLO, the knee of the curve.

Decides which load to run next from the results so far; runs it through a function it is given. Pure but for that. A
point whose verdict is `client_limited` says nothing of the server: it never counts as holding. Floor 3.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from kvctl.bench.run_config import LoadConfig
from kvctl.errors import ConfigError
from kvctl.workload.arrivals import ArrivalSpec

Parameter = Literal["concurrency", "rate"]
Result = Mapping[str, Any]
RunAt = Callable[[float], Sequence[Result]]  # a value of the parameter -> the results of its repeats

_MAX_DOUBLINGS = 14
_RATE_PRECISION = 0.05  # the bisection ends when the bounds are this close
_KNEE_SHARE = 0.90  # of the best throughput
_NO_GAIN = 1.05  # twice the load for less than 5 % more: past the knee


@dataclass(frozen=True)
class Sweep:
    """The parameter and its values."""

    parameter: Parameter
    values: tuple[float, ...]

    @classmethod
    def parse(cls, text: str) -> "Sweep":
        """Read 'concurrency=1,2,4' or 'rate=0.5,1,2'.

        Raises:
            ConfigError: none of these.
        """
        hint = "Write --sweep concurrency=1,2,4,8 or rate=1,2,5."
        name, separator, listed = text.partition("=")
        if not separator or name not in ("concurrency", "rate"):
            raise ConfigError(f"{text!r} is no sweep", hint=hint)
        try:
            values = tuple(float(part) for part in listed.split(",") if part.strip())
        except ValueError:
            raise ConfigError(f"{listed!r} is no list of numbers", hint=hint) from None
        if not values or any(not 0 < value < 1e6 for value in values):
            raise ConfigError(f"{listed!r} is no list of loads above 0", hint=hint)
        if name == "concurrency" and any(value != int(value) for value in values):
            raise ConfigError("half a stream cannot be run", hint=hint)
        return cls("concurrency" if name == "concurrency" else "rate", values)


def load_at(load: LoadConfig, parameter: Parameter, value: float) -> LoadConfig:
    """The load with its parameter set."""
    if parameter == "concurrency":
        return replace(load, concurrency=int(value), arrivals=None, replay=False, max_in_flight=None)
    arrivals = ArrivalSpec.steady(value, load.process, load.burstiness)
    return replace(load, concurrency=None, replay=False, arrivals=arrivals)


def run_sweep(sweep: Sweep, run_at: RunAt) -> list[dict[str, Any]]:
    """Run every value, in order."""
    return [_point(value, run_at(value)) for value in sweep.values]


def find_max_rate(run_at: RunAt, *, slo_share: float, start: float) -> tuple[list[dict[str, Any]], float | None]:
    """Double the rate until the SLO breaks, then bisect. Returns all points and the highest rate that held."""
    points: dict[float, dict[str, Any]] = {}

    def holds(rate: float) -> bool:
        rate = _rounded(rate)
        if rate not in points:
            points[rate] = _point(rate, run_at(rate))
            if is_client_limited(points[rate]["results"]):  # chance on a busy machine: once more
                points[rate] = _point(rate, run_at(rate))
            points[rate]["holds"] = _holds(points[rate]["results"], slo_share)
        return bool(points[rate]["holds"])

    low, high = 0.0, start
    for _ in range(_MAX_DOUBLINGS):
        if not holds(high):
            break
        low, high = high, high * 2
    else:
        return _in_order(points), _rounded(low)
    if low == 0.0:  # even the first broke it: go down as far
        for _ in range(_MAX_DOUBLINGS):
            candidate = high / 2
            if holds(candidate):
                low = candidate
                break
            high = candidate
        else:
            return _in_order(points), None
    while high / low > 1 + _RATE_PRECISION:
        middle = (low * high) ** 0.5
        if _rounded(middle) in (_rounded(low), _rounded(high)):
            break
        if holds(middle):
            low = middle
        else:
            high = middle
    return _in_order(points), _rounded(low)


def find_knee(run_at: RunAt, *, start: int = 1, limit: int = 4096) -> tuple[list[dict[str, Any]], float | None]:
    """Double the concurrency until throughput stops growing, look between; returns points and the knee.

    The knee is the smallest concurrency that gives at least 90 % of the best throughput: more load buys waiting.
    """
    points: dict[float, dict[str, Any]] = {}

    def throughput(concurrency: int) -> float:
        if concurrency not in points:
            points[concurrency] = _point(concurrency, run_at(concurrency))
        return output_throughput(points[concurrency]["results"])

    concurrency, flat = start, 0
    while concurrency * 2 <= limit and flat < 2:
        flat = flat + 1 if throughput(concurrency * 2) < throughput(concurrency) * _NO_GAIN else 0
        concurrency *= 2
    best = max(throughput(int(value)) for value in list(points))
    if best <= 0:
        return _in_order(points), None
    enough = sorted(int(value) for value in points if throughput(int(value)) >= _KNEE_SHARE * best)
    knee = enough[0]
    low = knee // 2
    while knee - low > max(1, knee // 8):
        middle = (low + knee) // 2
        if throughput(middle) >= _KNEE_SHARE * best:
            knee = middle
        else:
            low = middle
    return _in_order(points), float(knee)


def output_throughput(results: Sequence[Result]) -> float:
    """The mean output tokens/s of repeats, of the steady window where there is one."""
    values = [(r["summary"]["steady"] or r["summary"])["output_throughput"] or 0.0 for r in results]
    return sum(values) / len(values) if values else 0.0


def is_client_limited(results: Sequence[Result]) -> bool:
    """Whether a point says nothing of the server because this client was the limit."""
    return any(result["client"]["verdict"] != "valid" for result in results)


def ended_at_client(points: Sequence[Mapping[str, Any]], found: float | None) -> bool:
    """Whether a search for the highest rate ended at what this client can send, not at what the server can serve."""
    above = [point for point in points if not point["holds"] and point["value"] > (found or 0.0)]
    return bool(above) and is_client_limited(above[0]["results"])


def found_text(search: Mapping[str, Any]) -> str:
    """What a search found, in words."""
    if search["found"] is not None:
        text = f"found: {search['parameter']} {search['found']:g}"
        return text + ("; above it this client was the limit, not the server" if search["ended_at_client"] else "")
    if search["interrupted"]:
        return "interrupted before anything was found"
    return "found: none that holds"


def _holds(results: Sequence[Result], slo_share: float) -> bool:
    """Whether every repeat kept the SLO, was sent in time and was not the client's limit."""
    for result in results:
        goodput, client = result["summary"]["goodput"], result["client"]
        if goodput is None or goodput["share"] is None or goodput["share"] < slo_share:
            return False
        if client["never_sent"] or result["stopped_by_errors"]:
            return False
    return not is_client_limited(results)


def _point(value: float, results: Sequence[Result]) -> dict[str, Any]:
    return {"value": value, "results": list(results)}


def _rounded(rate: float) -> float:
    return float(f"{rate:.3g}")


def _in_order(points: Mapping[float, dict[str, Any]]) -> list[dict[str, Any]]:
    return [points[value] for value in sorted(points)]
