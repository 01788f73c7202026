"""The contents of the page, part by part, as styled lines: what both `--once` and the screen show. Pure.

Each function takes a view or a snapshot, the width it may use and the look, and returns lines no wider than that.
Every string that came from a server has been made printable before it gets here. Floor 3.
"""

from collections.abc import Sequence

from rich.cells import cell_len
from rich.text import Text

from kvctl.metrics.server_names import Server
from kvctl.top import words
from kvctl.top.gpu import GpuReading
from kvctl.top.graph import bar
from kvctl.top.look import Look
from kvctl.top.monitor import EngineView
from kvctl.top.snapshot import Distribution, Snapshot
from kvctl.top.verdict import EXPLAINED, TITLES, Advice, confidence_word
from kvctl.units import format_bytes

Part = tuple[str, str]  # text, style
_NARROW = 50  # columns: half a small terminal


def line(*parts: Part, width: int, look: Look) -> Text:
    """Join parts into one line, cut at `width` with an ellipsis."""
    text = Text(no_wrap=True, overflow="ellipsis", end="")
    for content, style in parts:
        text.append(content, style=style)
    if text.cell_len > width:
        text.truncate(max(0, width - 1), overflow="crop")
        text.append(look.cut, style=look.palette.dim)
    return text


def wrapped(content: str, style: str, width: int, *, first: str = "", rest: str = "") -> list[Text]:
    """Break a sentence into lines; `first` and `rest` are what the first and the further lines begin with."""
    lines: list[Text] = []
    current = first
    empty = True
    for word in content.split(" "):
        gap = "" if empty else " "
        if not empty and cell_len(current) + len(gap) + cell_len(word) > width:
            lines.append(Text(current, style=style, no_wrap=True, end=""))
            current, gap = rest, ""
        current += gap + word
        empty = False
    lines.append(Text(current, style=style, no_wrap=True, end=""))
    for one in lines:
        one.truncate(width, overflow="crop")
    return lines


def verdict_title(view: EngineView, width: int, look: Look) -> Text:
    """The one thing to read first: the limit, how sure, and over what window."""
    finding = view.verdict.finding
    title = f" {TITLES[finding.limit].upper()} "
    parts: list[Part] = [(title, look.banner(finding.limit, finding.confidence))]
    if finding.limit.binds:
        parts.append((f"  {confidence_word(finding.confidence)}", look.of(finding.limit, finding.confidence)))
    if view.verdict.window_s is not None:
        parts.append((f"  last {view.verdict.window_s:.0f} s", look.palette.dim))
    if view.is_stale:
        age = "" if view.age_s is None else f" {words.seconds(view.age_s)}"
        parts.append((f"  STALE{age}", look.palette.bad))
    others = [other.limit.value for other in view.verdict.also if other.confidence >= 0.5]
    if others:
        parts.append((f"  also: {', '.join(others)}", look.palette.warn))
    return line(*parts, width=width, look=look)


def advice_lines(advice: Advice, server: Server, width: int, look: Look) -> list[Text]:
    """One advice: the flag to type first, why below it or behind it."""
    indent = " " * (len(look.arrow) + 1)
    flag = advice.flag_for(server)
    if flag is not None:
        return [
            line((f"{look.arrow} ", look.palette.good), (flag, look.palette.good), width=width, look=look),
            *wrapped(advice.text, look.palette.label, width, first=indent, rest=indent),
        ]
    lines = wrapped(advice.text, look.palette.value, width, first=f"{look.arrow} ", rest=indent)
    other = advice.flag_for(Server.VLLM)
    if other is not None:
        lines.append(line((f"{indent}{Server.VLLM.value}: {other}", look.palette.dim), width=width, look=look))
    return lines


def verdict_lines(
    view: EngineView, width: int, look: Look, *, max_lines: int | None = None, with_evidence: bool = True
) -> list[Text]:
    """Verdict, evidence and advice; with `max_lines` the advice comes before the evidence that does not fit."""
    finding = view.verdict.finding
    server = view.snapshot.server if view.snapshot else Server.UNKNOWN
    lines = [verdict_title(view, width, look)]
    lines += wrapped(finding.summary, look.palette.title, width)
    if view.error is not None:
        lines += wrapped(f"{view.label}: {view.error}", look.palette.bad, width)
    advice = [advice_lines(one, server, width, look) for one in finding.advice]
    evidence = [
        one
        for fact in (finding.evidence if with_evidence else ())
        for one in wrapped(fact.text, look.palette.label, width, first=f"  {look.dot} ", rest="    ")
    ]
    if max_lines is None:
        return [*lines, *evidence, *(one for block in advice for one in block)]
    for block in advice:
        if len(lines) + len(block) <= max_lines:
            lines += block
        elif len(lines) < max_lines:
            lines.append(block[0])
    for one in evidence:
        if len(lines) < max_lines:
            lines.append(one)
    return lines[:max_lines]


def explain_lines(view: EngineView, width: int, look: Look) -> list[Text]:
    """Everything behind the verdict: what the limit means, the evidence, every advice in both spellings."""
    finding = view.verdict.finding
    palette = look.palette
    lines = [verdict_title(view, width, look), Text("")]
    lines += wrapped(finding.summary, palette.title, width)
    lines += [Text(""), Text("What it means", style=palette.calm)]
    lines += wrapped(EXPLAINED[finding.limit], palette.label, width)
    if finding.evidence:
        lines += [Text(""), Text("Why", style=palette.calm)]
        for fact in finding.evidence:
            lines += wrapped(fact.text, palette.value, width, first=f"{look.dot} ", rest="  ")
    if finding.advice:
        lines += [Text(""), Text("What to change", style=palette.calm)]
        for one in finding.advice:
            lines += wrapped(one.text, palette.value, width, first=f"{look.arrow} ", rest="  ")
            for server, flag in one.flags:
                own = view.snapshot is not None and server is view.snapshot.server
                if own or server in (Server.KVCTL, Server.VLLM):
                    lines.append(
                        line((f"    {server.value:<12} ", palette.dim), (flag, palette.good), width=width, look=look)
                    )
    others = [other for other in view.verdict.also if other.confidence > 0]
    if others:
        lines += [Text(""), Text("Other limits that show", style=palette.calm)]
        for other in others:
            text = f"{other.limit.value} ({confidence_word(other.confidence)}): {other.summary}"
            lines += wrapped(text, palette.label, width, first=f"{look.dot} ", rest="  ")
    return lines


def requests_lines(now: Snapshot, width: int, look: Look) -> list[Text]:
    """Running, waiting by reason, finished and rejected."""
    p = look.palette
    seats = f" of {now.max_num_seqs}" if now.max_num_seqs else ""
    waiting_style = p.bad if (now.waiting or 0) > 0 else p.value
    first: list[Part] = [
        ("running ", p.label),
        (words.count(now.running), p.value),
        (seats, p.label),
        ("  waiting ", p.label),
        (words.count(now.waiting), waiting_style),
    ]
    reasons = _reasons(now) if (now.waiting or 0) > 0 else ""
    narrow = width < _NARROW
    second: list[Part] = []
    if reasons and narrow:
        second += [("for ", p.label), (reasons, p.warn)]
    else:
        first += [(f" {reasons}", p.warn)] if reasons else []
        second += [("finished ", p.label), (words.rate(now.finished_per_s), p.value), ("/s", p.label)]
    if now.rejected_per_s:
        second += [("  rejected ", p.label), (words.rate(now.rejected_per_s), p.bad), ("/s", p.label)]
    second += [("  preempted ", p.label)]
    second += [(words.rate(now.preemptions_per_s), p.bad if now.preemptions_per_s else p.value), ("/s", p.label)]
    return [line(*first, width=width, look=look), line(*second, width=width, look=look)]


def _reasons(now: Snapshot) -> str:
    """What the waiting requests wait for: kvctl's reasons with their shares, else vLLM's two with their numbers."""
    said = {reason: number for reason, number in now.waiting_reasons.items() if number > 0}
    total = sum(said.values())
    if total > 0:
        ordered = sorted(said, key=lambda reason: -said[reason])
        return ", ".join(f"{reason} {words.percent(said[reason] / total)}" for reason in ordered[:3])
    pairs = (("capacity", now.waiting_capacity), ("deferred", now.waiting_deferred))
    return ", ".join(f"{reason} {words.count(number)}" for reason, number in pairs if number)


def kv_lines(now: Snapshot, width: int, look: Look) -> list[Text]:
    """KV cache as bar, tokens, bytes, headroom, time to full, and what the prefix cache finds."""
    p = look.palette
    usage = now.kv_usage
    style = p.dim if usage is None else p.bad if usage >= 0.9 else p.warn if usage >= 0.7 else p.good
    narrow = width < _NARROW
    filled, rest = bar(usage, max(4, min(24, width - 28)), glyphs=look.glyphs)
    first: list[Part] = [(filled, style), (rest, p.rest), (f" {words.percent(usage):>4}", style)]
    if now.kv_capacity_tokens:
        used, capacity = words.tokens(now.kv_used_tokens), words.tokens(now.kv_capacity_tokens)
        first.append((f"  {used} of {capacity}{'' if narrow else ' tokens'}", p.label))
    size = now.request_size
    room = words.count(None if now.headroom_requests is None else float(now.headroom_requests))
    second: list[Part] = [("room for ", p.label), (room, p.value), (" more", p.label)]
    if size is not None:
        second.append((f" of {words.tokens(size.tokens)} tokens", p.label))
    if now.time_to_full_s is not None and now.time_to_full_s < 3600 and not now.waiting:
        second.append((f"  full in {words.seconds(now.time_to_full_s)}", p.warn))
    if now.kv_cache_bytes and not narrow:
        in_bytes = f"  {format_bytes(now.kv_used_bytes or 0.0)} of {format_bytes(now.kv_cache_bytes)}"
        if sum(len(text) for text, _ in second) + len(in_bytes) <= width:
            second.append((in_bytes, p.label))
    return [line(*first, width=width, look=look), line(*second, width=width, look=look), _prefix_line(now, width, look)]


def _prefix_line(now: Snapshot, width: int, look: Look) -> Text:
    p = look.palette
    parts: list[Part] = [("prefix hits ", p.label), (words.percent(now.prefix_hit_rate), p.value)]
    if now.prefix_queries and width >= _NARROW:
        parts.append((f" of {words.tokens(now.prefix_queries)} tokens", p.label))
    missed = sum(now.miss_reasons.values())
    if missed > 0:
        reason = max(now.miss_reasons, key=lambda key: now.miss_reasons[key])
        parts.append((f"  missed {words.percent(now.miss_reasons[reason] / missed)} {reason}", p.label))
    if now.offload_usage is not None:
        parts.append((f"  offload {words.percent(now.offload_usage)}", p.label))
    return line(*parts, width=width, look=look)


def throughput_lines(now: Snapshot, width: int, look: Look) -> list[Text]:
    """Tokens out and in per second, tokens per step, speculative decoding."""
    p = look.palette
    first: list[Part] = [
        ("out ", p.label),
        (words.rate(now.generation_tokens_per_s), p.value),
        ("  in ", p.label),
        (words.rate(now.prompt_tokens_per_s), p.value),
        (" tokens/s", p.label),
    ]
    computed = now.computed_prompt_tokens_per_s
    if computed is not None and now.prompt_tokens_per_s and computed < 0.995 * now.prompt_tokens_per_s:
        first.append((f" ({words.rate(computed)} computed)", p.label))
    mean = now.step_tokens.mean if now.step_tokens else None
    budget = f" of {words.count(float(now.max_num_batched_tokens))}" if now.max_num_batched_tokens else ""
    second: list[Part] = [
        ("step ", p.label),
        (words.count(mean), p.value),
        (budget if width < 34 else f"{budget} tokens", p.label),
    ]
    second += [("  ", p.label), (words.rate(now.steps_per_s), p.value), ("/s", p.label)]
    if now.acceptance_rate is not None or now.accept_length is not None:
        second += [("  accepted ", p.label), (words.percent(now.acceptance_rate), p.value)]
        if now.accept_length is not None:
            second.append((f" {now.accept_length:.2f} tok/step", p.label))
    return [line(*first, width=width, look=look), line(*second, width=width, look=look)]


LATENCIES = (
    ("first token", "ttft_s"),
    ("between", "itl_s"),
    ("per token", "tpot_s"),
    ("whole", "e2e_s"),
    ("queue", "queue_s"),
    ("prefill", "prefill_s"),
    ("decode", "decode_s"),
)


def latency_lines(now: Snapshot, width: int, look: Look, *, max_lines: int | None = None) -> list[Text]:
    """One row per latency: exact mean, and the brackets that p50 and p99 lie in."""
    p = look.palette
    wide = width >= 62
    column = 18 if width >= 76 else 16 if wide else 12
    names = [name for name in ("p50", "p99") if wide or width >= 44 or name == "p99"]
    titles = f"{'':<12}{'mean':>8}" + "".join(f"{name:>{column}}" for name in names)
    lines = [line((titles + (f"{'count':>8}" if wide else ""), p.dim), width=width, look=look)]
    for title, attribute in LATENCIES:
        spread: Distribution | None = getattr(now, attribute)
        style = p.label if spread else p.dim
        parts: list[Part] = [(f"{title:<12}", p.label)]
        parts.append((f"{words.seconds(spread.mean if spread else None):>8}", p.value if spread else p.dim))
        for name in names:
            cell = words.bracket(getattr(spread, name) if spread else None)
            parts.append((f"{cell if wide else cell.replace(' .. ', '..'):>{column}}", style))
        if wide:
            parts.append((f"{words.count(spread.count) if spread else words.MISSING:>8}", p.dim))
        lines.append(line(*parts, width=width, look=look))
    return lines if max_lines is None else lines[:max_lines]


def gpu_lines(gpus: Sequence[GpuReading], width: int, look: Look) -> list[Text]:
    """One line per GPU of this machine."""
    p = look.palette
    lines = []
    for gpu in gpus:
        parts: list[Part] = [(f"GPU {gpu.index} ", p.label), (gpu.name, p.value)]
        if gpu.used_bytes is not None and gpu.total_bytes:
            parts.append((f"  {format_bytes(gpu.used_bytes)} of {format_bytes(gpu.total_bytes)}", p.label))
        parts += [("  busy ", p.label), (words.percent(gpu.busy), p.value)]
        parts += [("  memory busy ", p.label), (words.percent(gpu.memory_busy), p.value)]
        if gpu.power_w is not None:
            limit = f" of {gpu.power_limit_w:.0f}" if gpu.power_limit_w else ""
            parts.append((f"  {gpu.power_w:.0f}{limit} W", p.label))
        lines.append(line(*parts, width=width, look=look))
    return lines
