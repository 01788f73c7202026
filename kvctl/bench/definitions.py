"""What each number of a result means; travels with every result, so that two tools can be compared. Floor 3."""

DEFINITIONS: dict[str, str] = {
    "sent": "just before the request is handed to the kernel (t0 of every latency below unless it says due)",
    "due": "when the schedule (open loop), the trace, or the stream that became free (closed loop) called for it",
    "arrival": "when the bytes that complete an event came in: by the kernel's clock (timing=kernel) or at the read "
    "(timing=read); one moment per read",
    "token event": "an event with at least one generated token: text, reasoning or a tool call; never a role, "
    "a finish reason or usage alone",
    "ttft_ms": "sent to the first token event, reasoning included",
    "ttft_due_ms": "due to the first token event: what a user waited, the client's own queue included",
    "ttfo_ms": "sent to the first event of the answer proper (after any reasoning)",
    "tpot_ms": "per request (last token event - first) / (output tokens - tokens in the first event); tokens in the "
    "first event from continuous usage where sent, else output tokens / token events",
    "gap_ms": "between neighbouring token events of a request, pooled over all completed requests: the view of stalls",
    "max_gap_ms": "the longest gap of each request",
    "e2e_ms": "sent to the last token event",
    "client_queue_ms": "due to sent",
    "tokens_per_event": "output tokens / token events",
    "output tokens": "the server's usage where it tells it, else token events; never the number asked for",
    "duration_s": "start of the load to the last answer, ramp and drain included",
    "throughput": "completed requests and their tokens over duration_s; steady: what arrived within the steady window "
    "over its length",
    "steady window": "closed loop: from the end of the ramp to the first idle slot; open loop: from one median E2E "
    "after the start to the end of the schedule; none when shorter than two median E2E",
    "drain_s": "from the end of the issuing to the last answer",
    "unfinished": "under way when the user stopped the run: neither completed nor failed",
    "late": "sent more than 5 ms after due (not counting waits under --max-in-flight)",
    "never_sent": "due, but the run ended before a place was free",
    "goodput": "requests that kept every limit of the SLO, over all that were due; failed and never-sent ones miss",
    "percentiles": "linear interpolation between order statistics; null below 1/(1-p) samples (p99: 100)",
    "ci95": "shares: Wilson; percentiles: binomial order statistics, at least 95 %",
    "lag_ms": "timing=kernel: from arrival to the handling of each read; timing=read: how late the event loop met a "
    "deadline. With timing=kernel no latency contains it",
    "coalesced_share": "token events that came in one read with the one before them (their gap reads 0)",
}
