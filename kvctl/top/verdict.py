"""The words of a diagnosis: which limit, how sure, on what evidence, and what to change.

Types only; the rules are in `limits_queue` and `limits_flow`, the choice among them in `diagnose`. Floor 3.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from kvctl.metrics.server_names import Server


class Limit(StrEnum):
    """What a server is short of."""

    KV_BLOCKS = "kv_blocks"
    MAX_NUM_SEQS = "max_num_seqs"
    TOKEN_BUDGET = "token_budget"
    DECODE_BANDWIDTH = "decode_bandwidth"
    DEFERRED = "deferred"
    STUCK = "stuck"
    PREFIX_THRASH = "prefix_thrash"
    PREFIX_TOO_SHORT = "prefix_too_short"
    FRONTEND = "frontend"
    IDLE = "idle"
    HEALTHY = "healthy"
    UNKNOWN = "unknown"

    @property
    def binds(self) -> bool:
        """Whether something is to be changed."""
        return self not in (Limit.IDLE, Limit.HEALTHY, Limit.UNKNOWN)


TITLES = {
    Limit.KV_BLOCKS: "KV cache is full",
    Limit.MAX_NUM_SEQS: "All seats are taken",
    Limit.TOKEN_BUDGET: "Prefill fills every step",
    Limit.DECODE_BANDWIDTH: "Decode is at its bandwidth",
    Limit.DEFERRED: "Requests are held back",
    Limit.STUCK: "Nothing moves",
    Limit.PREFIX_THRASH: "Prefix cache throws out what comes back",
    Limit.PREFIX_TOO_SHORT: "Prefix cache finds nothing",
    Limit.FRONTEND: "API process or client is the limit",
    Limit.IDLE: "Idle",
    Limit.HEALTHY: "Healthy",
    Limit.UNKNOWN: "Cannot tell",
}
EXPLAINED = {
    Limit.KV_BLOCKS: (
        "Every running request holds KV blocks for its prompt and output. When the blocks run out, new requests wait "
        "and running ones are preempted: their work is thrown away and done again. More seats only make it worse."
    ),
    Limit.MAX_NUM_SEQS: (
        "The scheduler runs at most max_num_seqs requests at once. The queue waits for a seat although the KV cache "
        "has room, so the device works on smaller batches than it could."
    ),
    Limit.TOKEN_BUDGET: (
        "One step computes at most max_num_batched_tokens tokens. Prompts arrive faster than these steps take them "
        "in, so requests wait for their prefill, and running ones wait for each full step."
    ),
    Limit.DECODE_BANDWIDTH: (
        "Each decode step reads the weights and the KV of all running requests. When tokens/s no longer rises with "
        "the number of running requests, each further request only slows the others down."
    ),
    Limit.DEFERRED: (
        "These requests could be scheduled but for something of their own: a LoRA adapter without a slot, a grammar "
        "still compiling, KV blocks still coming from another server."
    ),
    Limit.STUCK: "Requests are there, and over the window the server computed no token and finished none.",
    Limit.PREFIX_THRASH: (
        "Prompts begin like earlier ones, but the blocks were evicted before they came back. With least-recently-used "
        "eviction a cycle just larger than the cache finds nothing at all, not a little."
    ),
    Limit.PREFIX_TOO_SHORT: (
        "Only whole blocks are shared. A common beginning shorter than one block, or a differing first token (a date, "
        "an id), shares nothing."
    ),
    Limit.FRONTEND: (
        "The engine has nothing waiting, yet clients see latency that the engine does not: HTTP, tokenizing, "
        "detokenizing or the client itself takes the time."
    ),
    Limit.IDLE: "No requests. What the server can do is not visible without load.",
    Limit.HEALTHY: "The server keeps up: nothing waits for long, and no limit shows.",
    Limit.UNKNOWN: "The page does not say enough for a verdict.",
}


@dataclass(frozen=True, slots=True)
class Evidence:
    """One fact with its number, as a sentence and for a program."""

    text: str
    metric: str
    value: float | None


@dataclass(frozen=True, slots=True)
class Advice:
    """What to change and why it would help; `flags` spells it for each kind of server that has it."""

    text: str
    flags: tuple[tuple[Server, str], ...] = ()

    def flag_for(self, server: Server) -> str | None:
        """Return the flag in that server's spelling."""
        return dict(self.flags).get(server)


@dataclass(frozen=True, slots=True)
class Finding:
    """One rule's answer. `confidence` is 0 to 1: how well the evidence separates this limit from the others."""

    limit: Limit
    confidence: float
    summary: str  # one sentence
    evidence: tuple[Evidence, ...] = ()
    advice: tuple[Advice, ...] = ()


@dataclass(frozen=True, slots=True)
class Verdict:
    """The chosen finding and the other limits that show."""

    finding: Finding
    window_s: float | None
    also: tuple[Finding, ...] = ()

    @property
    def limit(self) -> Limit:
        """The limit that binds, or idle, healthy, unknown."""
        return self.finding.limit

    def to_json(self, server: Server) -> dict[str, Any]:
        """Return the object of `--json`; `server` is the kind that was observed."""
        finding = self.finding
        return {
            "limit": finding.limit.value,
            "confidence": round(finding.confidence, 2),
            "summary": finding.summary,
            "evidence": [{"text": e.text, "metric": e.metric, "value": e.value} for e in finding.evidence],
            "advice": [
                {
                    "text": a.text,
                    "kvctl": a.flag_for(Server.KVCTL),
                    "vllm": a.flag_for(Server.VLLM),
                    "server": a.flag_for(server),
                }
                for a in finding.advice
            ],
            "explain": EXPLAINED[finding.limit],
            "window_s": self.window_s,
            "also": [{"limit": f.limit.value, "confidence": round(f.confidence, 2)} for f in self.also],
        }


def confidence_word(confidence: float) -> str:
    """'sure', 'likely' or 'possible'."""
    return "sure" if confidence >= 0.85 else "likely" if confidence >= 0.6 else "possible"
