"""Gathers what a run measured: a row per request, gaps between events, tokens over time, errors, the client's lag.

Takes finished exchanges; reads no socket. All of it can be pickled and merged, for runs of several
processes. Memory grows by about 100 bytes per request and by nothing per event. Floor 3.
"""

from collections import Counter
from dataclasses import dataclass, field

from kvctl.bench.http_connection import Exchange
from kvctl.bench.request_table import RequestRow, RequestTable
from kvctl.metrics.log_histogram import LogHistogram
from kvctl.workload.request_plan import Turn

BINS_PER_S = 10
CANCELLED = "cancelled"  # by the end of the drain, or by the user


@dataclass
class Measurements:
    """What one load process measured. Moments are perf_counter seconds of one machine."""

    rows: RequestTable = field(default_factory=RequestTable)
    gaps: LogHistogram = field(default_factory=LogHistogram)
    lags: LogHistogram = field(
        default_factory=LogHistogram
    )  # handled minus arrived; without the kernel's clock: probes
    tokens_per_bin: dict[int, float] = field(default_factory=dict)  # per 1 / BINS_PER_S of the clock
    in_flight_per_bin: dict[int, int] = field(default_factory=dict)  # as sampled
    errors: Counter[str] = field(default_factory=Counter)
    error_texts: dict[str, str] = field(default_factory=dict)  # the first of each kind
    token_times_s: dict[int, list[float]] = field(default_factory=dict)  # by request number, with --records
    num_never_sent: int = 0
    num_unfinished: int = 0  # under way when the user stopped the run: neither completed nor failed
    num_connections: int = 0
    max_in_flight: int = 0
    start_s: float = 0.0
    ramp_end_s: float = 0.0
    issue_end_s: float = 0.0  # the first idle slot, or the end of the schedule
    end_s: float = 0.0
    cpu_s: float = 0.0
    max_rss_bytes: int = 0
    num_events: int = 0
    interrupted: bool = False
    stopped_by_errors: bool = False
    has_precise_timer: bool = True
    uses_kernel_clock: bool = False

    def merge(self, other: "Measurements") -> None:
        """Add what another process measured at the same time."""
        self.rows.merge(other.rows)
        self.gaps.merge(other.gaps)
        self.lags.merge(other.lags)
        for index, tokens in other.tokens_per_bin.items():
            self.tokens_per_bin[index] = self.tokens_per_bin.get(index, 0.0) + tokens
        for index, number in other.in_flight_per_bin.items():
            self.in_flight_per_bin[index] = self.in_flight_per_bin.get(index, 0) + number
        self.errors.update(other.errors)
        self.error_texts = other.error_texts | self.error_texts
        self.token_times_s |= other.token_times_s
        self.num_never_sent += other.num_never_sent
        self.num_unfinished += other.num_unfinished
        self.num_connections += other.num_connections
        self.max_in_flight += other.max_in_flight
        self.start_s = min(self.start_s, other.start_s)
        self.ramp_end_s = max(self.ramp_end_s, other.ramp_end_s)
        self.issue_end_s = min(self.issue_end_s, other.issue_end_s)
        self.end_s = max(self.end_s, other.end_s)
        self.cpu_s += other.cpu_s
        self.max_rss_bytes += other.max_rss_bytes
        self.num_events += other.num_events
        self.interrupted = self.interrupted or other.interrupted
        self.stopped_by_errors = self.stopped_by_errors or other.stopped_by_errors
        self.has_precise_timer = self.has_precise_timer and other.has_precise_timer
        self.uses_kernel_clock = self.uses_kernel_clock and other.uses_kernel_clock


class Collector:
    """Fills `Measurements` from exchanges as they end."""

    def __init__(self) -> None:
        self.measured = Measurements()
        self.in_flight = 0
        self.num_ended = 0
        self.recent_ttft_s: list[float] = []  # since the live view last looked
        self.output_tokens = 0.0

    def sent(self) -> None:
        """A request is about to be sent."""
        self.in_flight += 1
        if self.in_flight > self.measured.max_in_flight:
            self.measured.max_in_flight = self.in_flight

    def ended(self) -> None:
        """An answer is complete or has failed."""
        self.in_flight -= 1
        self.num_ended += 1

    def add(self, exchange: Exchange, number: int, turn: Turn, class_name: str) -> bool:
        """Take an exchange that has ended; returns whether it failed."""
        measured, decoder = self.measured, exchange.decoder
        kind, text = _outcome(exchange)
        if kind == CANCELLED and measured.interrupted:
            measured.num_unfinished += 1
            return True
        if kind:
            measured.errors[kind] += 1
            measured.error_texts.setdefault(kind, text)
        output_tokens = float(decoder.output_tokens if decoder.output_tokens is not None else decoder.num_events)
        tokens_per_event = output_tokens / decoder.num_events if decoder.num_events else 0.0
        measured.rows.append(
            RequestRow(
                number=number,
                class_name=class_name,
                error_kind=kind,
                due_s=exchange.due_s,
                sent_s=exchange.sent_s,
                first_s=decoder.first_s,
                first_answer_s=decoder.first_answer_s,
                last_s=decoder.last_s,
                end_s=exchange.end_s,
                connect_s=exchange.connect_s,
                place_wait_s=exchange.place_wait_s,
                max_gap_s=decoder.max_gap_s,
                output_tokens=output_tokens,
                first_event_tokens=decoder.first_event_tokens or tokens_per_event,
                num_events=decoder.num_events,
                prompt_tokens=-1 if decoder.prompt_tokens is None else decoder.prompt_tokens,
                cached_tokens=-1 if decoder.cached_tokens is None else decoder.cached_tokens,
                asked_prompt_tokens=-1 if turn.input_tokens is None else turn.input_tokens,
                asked_output_tokens=turn.output_tokens,
                reasoning_events=decoder.reasoning_events,
                coalesced_events=decoder.coalesced_events,
            )
        )
        measured.num_events += decoder.num_events
        self.output_tokens += output_tokens
        for index, events in decoder.events_per_bin.items():
            measured.tokens_per_bin[index] = measured.tokens_per_bin.get(index, 0.0) + events * tokens_per_event
        if not kind:
            measured.gaps.add_buckets(decoder.gap_buckets, decoder.gap_sum_s)
            if decoder.first_s and len(self.recent_ttft_s) < 10_000:
                self.recent_ttft_s.append(decoder.first_s - exchange.sent_s)
        if decoder.token_times_s is not None:
            measured.token_times_s[number] = decoder.token_times_s.tolist()
        return bool(kind)


def _outcome(exchange: Exchange) -> tuple[str, str]:
    """The kind of failure and what was said, or ("", "")."""
    decoder = exchange.decoder
    if decoder.error is not None:
        return "stream_error", decoder.error
    if exchange.error_kind is not None:
        return exchange.error_kind, exchange.error_text
    if decoder.malformed is not None:
        return "malformed", decoder.malformed
    if not decoder.is_done and decoder.finish_reason is None:
        return "incomplete", f"the stream ended without a finish reason or [DONE] after {decoder.num_events} events"
    return "", ""
