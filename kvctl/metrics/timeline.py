"""The one definition of a request's latencies, from timestamps. Server, client and simulator all use it.

Pure: reads no clock. All times are seconds of ONE monotonic clock; which one is the caller's business. A server
takes the moment its API process sees a token, a client the moment a chunk arrives, so that both name the same
spans with the same words:

    arrival ----queue---- admitted ----prefill---- first token ----decode---- last token
       |<------------- TTFT ---------------------------->|                       |
       |<------------- E2E ------------------------------+---------------------->|
                              |<------------- inference ------------------------>|

TTFT: time to first token. ITL: inter-token latency, the gap between two deliveries. TPOT: time per output token,
decode / (tokens - tokens of the first delivery), which is tokens - 1 where tokens come one by one: what a reader
of the stream feels on average; undefined (None) when no token follows the first delivery.
A span whose ends are not known is None, never 0. Floor 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


def _span_s(start_s: float | None, end_s: float | None) -> float | None:
    if start_s is None or end_s is None:
        return None
    return max(0.0, end_s - start_s)


@dataclass(frozen=True, slots=True)
class RequestTimeline:
    """When things happened to one request. None: it did not happen (yet), or is not known here.

    A client does not know `admitted_s`; a request that was aborted while waiting has no token times.
    """

    arrival_s: float
    admitted_s: float | None = None  # first admission; a preemption does not change it
    first_token_s: float | None = None
    last_token_s: float | None = None
    num_output_tokens: int = 0
    num_first_tokens: float = 1.0  # tokens that came with the first delivery; a client may know only their mean

    @property
    def ttft_s(self) -> float | None:
        """Arrival to first token."""
        return _span_s(self.arrival_s, self.first_token_s)

    @property
    def e2e_s(self) -> float | None:
        """Arrival to last token."""
        return _span_s(self.arrival_s, self.last_token_s)

    @property
    def queue_s(self) -> float | None:
        """Arrival to first admission."""
        return _span_s(self.arrival_s, self.admitted_s)

    @property
    def prefill_s(self) -> float | None:
        """First admission to first token."""
        return _span_s(self.admitted_s, self.first_token_s)

    @property
    def decode_s(self) -> float | None:
        """First token to last token."""
        return _span_s(self.first_token_s, self.last_token_s)

    @property
    def inference_s(self) -> float | None:
        """First admission to last token."""
        return _span_s(self.admitted_s, self.last_token_s)

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first delivery."""
        decode_s = self.decode_s
        if decode_s is None or self.num_output_tokens <= self.num_first_tokens:
            return None
        return decode_s / (self.num_output_tokens - self.num_first_tokens)


def inter_token_latencies_s(delivery_times_s: Sequence[float]) -> list[float]:
    """Return the gaps between deliveries, one fewer than there are. Tokens delivered together share one gap."""
    return [max(0.0, later - earlier) for earlier, later in pairwise(delivery_times_s)]
