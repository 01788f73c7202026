"""Chooses the limit that binds among all that show. Pure: no clock, no I/O.

Every rule looks at the same case; the most confident finding wins, in a tie the one nearer to the cause (a full
cache before the seats it empties). Without any, the server is idle or healthy; where the page does not carry the
numbers, the verdict is unknown and says which are missing. Floor 3.
"""

from collections.abc import Sequence

from kvctl.metrics.server_names import Server
from kvctl.top.case import Case, Point
from kvctl.top.limits_flow import FLOW_RULES, REST_RULES
from kvctl.top.limits_queue import QUEUE_RULES, stuck
from kvctl.top.snapshot import Snapshot
from kvctl.top.verdict import Advice, Evidence, Finding, Limit, Verdict
from kvctl.units import format_seconds

MIN_CONFIDENCE = 0.5


def diagnose(now: Snapshot | None, history: Sequence[Point] = ()) -> Verdict:
    """Say which limit binds in the snapshot's window; `history` is the session so far, oldest first."""
    if now is None or now.window_s is None:
        return Verdict(_too_little(now), None)
    missing = _missing(now)
    if missing:
        return Verdict(_not_said(now, missing), now.window_s)
    case = Case(now, history)
    dead = stuck(case)
    if dead is not None:
        return Verdict(dead, now.window_s)  # what a server that does not move says of its limits is old
    found = [finding for rule in (*QUEUE_RULES, *FLOW_RULES) if (finding := rule(case)) is not None]
    found.sort(key=lambda finding: -finding.confidence)  # stable: the rules' order decides a tie
    if found and found[0].confidence >= MIN_CONFIDENCE:
        others = tuple(finding for finding in found[1:] if finding.confidence >= MIN_CONFIDENCE)
        return Verdict(found[0], now.window_s, others)
    for rule in REST_RULES:
        finding = rule(case)
        if finding is not None:
            return Verdict(finding, now.window_s, tuple(found))
    return Verdict(_unexplained(case), now.window_s, tuple(found))


def unanswered(error: str | None, *, is_foreign: bool) -> Verdict:
    """The verdict on an endpoint of which no engine was ever read: why not."""
    if is_foreign:
        return Verdict(_no_server(), None)
    if error is None:
        return diagnose(None)
    text = f"No page could be read: {error}."
    return Verdict(Finding(Limit.UNKNOWN, 1.0, text, (Evidence("no reading", "readings", 0.0),)), None)


def _too_little(now: Snapshot | None) -> Finding:
    if now is not None and now.server is Server.UNKNOWN:
        return _no_server()
    if now is None:
        return Finding(Limit.UNKNOWN, 1.0, "No page has been read yet.", (Evidence("no reading", "readings", 0.0),))
    text = "Only one reading so far: rates need two."
    return Finding(Limit.UNKNOWN, 1.0, text, (Evidence("one reading", "readings", 1.0),))


def _no_server() -> Finding:
    text = "The page has no names of an inference server that kvctl knows."
    return Finding(Limit.UNKNOWN, 1.0, text, (), (Advice("Give the address of the server's /metrics page"),))


def _missing(now: Snapshot) -> list[str]:
    """Names what no verdict can do without."""
    needed = {"running requests": now.running, "waiting requests": now.waiting}
    return [name for name, value in needed.items() if value is None]


def _not_said(now: Snapshot, missing: list[str]) -> Finding:
    if now.server is Server.UNKNOWN:
        return _no_server()
    text = f"Cannot tell: the page does not say {' and '.join(missing)}."
    evidence = tuple(Evidence(f"missing: {name}", "missing", None) for name in missing)
    return Finding(Limit.UNKNOWN, 1.0, text, evidence)


def _unexplained(case: Case) -> Finding:
    """Somebody waits and no rule says why: say what would decide it."""
    now = case.now
    evidence = [Evidence(f"{case.waiting_mean:.3g} wait, {case.running_mean:.3g} run", "waiting", case.waiting_mean)]
    unsaid = {
        "KV usage": now.kv_usage,
        "preemptions": now.preemptions,
        "max_num_seqs": now.max_num_seqs,
        "tokens per step": now.step_tokens,
        "KV capacity in tokens": now.kv_capacity_tokens,
    }
    evidence += [Evidence(f"missing: {name}", "missing", None) for name, value in unsaid.items() if value is None]
    advice: tuple[Advice, ...] = ()
    window_s = now.window_s or 0.0
    if case.moved is False:
        text = f"Nothing has moved for {format_seconds(window_s)}: too short to call it stuck."
        advice = (Advice("Look for longer: kvctl top --once --interval 10"),)
    else:
        text = f"{case.waiting_mean:.3g} requests wait, and the numbers do not say for what."
        if len(now.trace.running) < 5:
            advice = (Advice("Look for longer: kvctl top, or --once --interval 10"),)
    return Finding(Limit.UNKNOWN, 0.5, text, tuple(evidence), advice)
