"""The page of `kvctl size`: a verdict, a memory bar, KV bytes, blocks, a curve, speeds, and what to change first.

Pure drawing of findings with Rich, right at 80 columns; decides nothing. Floor 4.
"""

import shutil
import textwrap
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvctl.cli.size_picture import PAGE_COLUMNS, Marks, curve_lines, memory_bar
from kvctl.cli.size_run import Findings, SizeOptions, is_terminal
from kvctl.errors import ConfigError
from kvctl.model.dtypes import kv_format
from kvctl.model.kv_cache_spec import KVOptions, kv_cache_specs, marginal_bytes_per_token
from kvctl.model.layer_shape import LayerKind
from kvctl.sizing.capacity import Capacity
from kvctl.sizing.json_report import PROGRAMS
from kvctl.sizing.recommend import Choice, obstacle, serve_command
from kvctl.sizing.request import SizeAnswer
from kvctl.sizing.speed import Band
from kvctl.units import format_bytes, format_count, format_seconds

_MOST_COLUMNS = 100


class _PageConsole(Console):
    """Rich's console, but a reader that has seen enough (`| head`) is no failure."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def show(options: SizeOptions, findings: Findings) -> None:
    """Print the page, and save it when asked.

    Raises:
        ConfigError: the picture cannot be written.
    """
    width = min(shutil.get_terminal_size().columns, _MOST_COLUMNS) if is_terminal() else PAGE_COLUMNS
    console = _PageConsole(record=options.svg is not None, width=max(width, PAGE_COLUMNS), highlight=False)
    for part in page(options, findings):
        console.print(part)
    if options.svg is not None:
        try:
            Path(options.svg).write_text(console.export_svg(title=f"kvctl size {options.model}"), encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"--svg {options.svg} cannot be written: {error.strerror}", hint="Check the folder."
            ) from error


def page(options: SizeOptions, findings: Findings) -> Iterable[Text | Table]:
    """The parts of the page, top to bottom."""
    answer = findings.answer
    marks = Marks(options.ascii_only)
    if options.max_context and answer.capacity is not None:
        yield longest_context(answer, answer.capacity)
    yield verdict(findings)
    yield _title(answer)
    if answer.budget is not None and answer.request.kv_bytes is None:
        yield Text()
        yield from memory_bar(answer, marks)
    yield Text()
    yield kv_table(answer, marks)
    if answer.capacity is not None:
        yield Text()
        yield blocks_table(answer, marks)
        curve = curve_lines(answer, marks)
        if curve:
            yield Text()
            yield from curve
    if findings.speed is not None:
        yield Text()
        yield from speed_part(findings, marks)
    if findings.choices:
        yield Text()
        yield choices_table(findings.choices, marks)
    if options.recommend:
        yield Text()
        if findings.recommended is not None:
            yield from recommended_part(findings.recommended)
        else:
            where = answer.request.hardware.id if answer.request.hardware else "the known GPUs"
            yield Text(f"Recommended: nothing. Not even 8 x {where} would do.", style="bold red")
    if findings.advice:
        yield Text()
        yield Text("What to change first", style="bold")
        for line in findings.advice:
            yield from _bullet(marks.bullet, line)
    notes = [*answer.notes, *findings.extra_notes, *_unverified(answer)]
    if notes:
        yield Text()
        for note in notes:
            yield from _bullet(marks.note, note, style="dim")
    if options.explain:
        from kvctl.cli.size_explain import explain

        yield Text()
        yield Text("How every number was found", style="bold")
        for line in explain(findings):
            yield Text(f"  {line}")


def _bullet(mark: str, line: str, style: str = "") -> Iterable[Text]:
    """A point with its further lines set in."""
    for i, part in enumerate(textwrap.wrap(line, PAGE_COLUMNS - 4, break_on_hyphens=False) or [""]):
        yield Text(f" {mark if i == 0 else ' '} {part}", style=style)


def _title(answer: SizeAnswer) -> Text:
    model, weights = answer.request.model, answer.weights
    count = f", {weights.num_parameters / 1e9:.2f} B parameters" if weights and weights.num_parameters else ""
    text = Text(model.id, style="bold")
    text.append(count, style="not bold")
    text.append(f"\n{model.shape.architecture}, {model.shape.attention}; {model.source}", style="dim")
    return text


def verdict(findings: Findings) -> Text:
    """One line that answers the question."""
    answer = findings.answer
    capacity, hardware = answer.capacity, answer.request.hardware
    where = _where(answer)
    if findings.users is not None:
        fit = findings.users
        many = f"{format_count(fit.users)} x {format_count(fit.context_tokens)} tokens"
        if fit.fits:
            return Text(f"FITS: {many} at once{where}; up to {format_count(fit.max_users)} would.", "bold green")
        return Text(f"DOES NOT FIT: {many}{where}; {format_count(fit.max_users)} at once do.", "bold red")
    if capacity is None:
        per_token = format_bytes(answer.bytes_per_token)
        weights = f", {format_bytes(answer.weights.total_bytes)} of weights" if answer.weights else ""
        machine = f" ({hardware.id} named, memory not divided)" if hardware else ""
        return Text(f"{per_token} of KV cache per token{weights}{machine}.", "bold")
    length = format_count(capacity.max_model_len)
    if capacity.fits:
        text = f"FITS: {capacity.max_concurrency:.2f} requests of {length} tokens at once{where}."
        return Text(text, "bold green")
    if capacity.kv_bytes <= 0:
        return Text(f"DOES NOT FIT: weights and overheads leave no memory for KV cache{where}.", "bold red")
    longest = format_count(capacity.max_context_tokens)
    return Text(f"DOES NOT FIT: one request of {length} tokens{where}; {longest} tokens would.", "bold red")


def longest_context(answer: SizeAnswer, capacity: Capacity) -> Text:
    """The answer to --max-context, and what binds: the memory or the model."""
    longest, own = capacity.max_context_tokens, answer.request.model.shape.max_model_len
    if longest == own:
        return Text(f"{format_count(longest)} tokens, the model's own limit, fit: memory does not bind.", "bold")
    return Text(f"{format_count(longest)} tokens is the longest context that fits.", "bold")


def _where(answer: SizeAnswer) -> str:
    request = answer.request
    gpus = request.parallel.gpus
    machine = f" on {gpus} x {request.hardware.id}" if request.hardware and gpus > 1 else ""
    if request.hardware and gpus == 1:
        machine = f" on {request.hardware.id}"
    return f"{machine} ({answer.rules.label})"


def kv_table(answer: SizeAnswer, marks: Marks) -> Table:
    """KV bytes of one token as the model is, as MHA, GQA and MQA, and in other formats."""
    table = marks.table("KV cache bytes per token (all layers, all GPUs)")
    table.add_column("")
    formats = list(dict.fromkeys([answer.dtype if answer.kv_dtype == "auto" else answer.kv_dtype, "fp8", "nvfp4"]))
    for name in formats:
        table.add_column(name, justify="right")
    for label, heads in _head_variants(answer):
        row = [label]
        row += [format_bytes(_bytes_with(answer, heads, name)) for name in formats]
        table.add_row(*row, style="bold" if label.startswith("this model") else None)
    return table


def _head_variants(answer: SizeAnswer) -> list[tuple[str, int | None]]:
    shape = answer.request.model.shape
    layer = next((x for x in shape.layers if x.kind in (LayerKind.FULL, LayerKind.SLIDING) and x.value_dim), None)
    variants: list[tuple[str, int | None]] = [(f"this model ({shape.attention})", None)]
    if layer is None:
        return variants
    heads = shape.num_attention_heads
    if layer.num_kv_heads != heads:
        variants.append((f"if it were MHA ({heads} heads)", heads))
    if layer.num_kv_heads == heads and heads % 8 == 0 and heads > 8:
        variants.append(("if it were GQA (8 heads)", 8))
    if layer.num_kv_heads != 1:
        variants.append(("if it were MQA (1 head)", 1))
    return variants


def _bytes_with(answer: SizeAnswer, heads: int | None, kv_dtype: str) -> int:
    shape = answer.request.model.shape
    if heads is not None:
        layers = tuple(replace(x, num_kv_heads=heads) if x.value_dim and x.num_kv_heads else x for x in shape.layers)
        shape = replace(shape, layers=layers)
    specs = kv_cache_specs(shape, KVOptions(kv_format(kv_dtype, answer.dtype), 1, answer.dtype))
    return marginal_bytes_per_token(specs, answer.limits.max_model_len)


def blocks_table(answer: SizeAnswer, marks: Marks) -> Table:
    """Blocks, tokens and concurrency, with the range of the memory."""
    capacity, low, high, pool = answer.capacity, answer.capacity_low, answer.capacity_high, answer.pool
    assert capacity is not None and low is not None and high is not None and pool is not None
    table = marks.table(f"Blocks by the rule of {answer.rules.label}")
    for name in ("", "low", "expected", "high"):
        table.add_column(name, justify="left" if not name else "right")
    rows = (
        ("KV memory a GPU", [format_bytes(c.kv_bytes) for c in (low, capacity, high)]),
        ("blocks", [format_count(c.num_blocks) for c in (low, capacity, high)]),
        ("usable (no null block)", [format_count(c.usable_blocks) for c in (low, capacity, high)]),
        ("tokens as printed", [format_count(c.kv_tokens) for c in (low, capacity, high)]),
        (
            f"requests of {format_count(capacity.max_model_len)}",
            [f"{c.max_concurrency:.2f}" for c in (low, capacity, high)],
        ),
        ("longest request", [format_count(c.max_context_tokens) for c in (low, capacity, high)]),
    )
    for label, cells in rows:
        if len(set(cells)) == 1:
            cells = ["", cells[1], ""]
        table.add_row(label, *cells)
    groups = len(pool.groups)
    table.add_row(
        "one block",
        "",
        format_bytes(pool.block_bytes),
        f"{format_count(pool.block_tokens)} tokens" + (f", {groups} groups" if groups > 1 else ""),
    )
    if answer.state_bytes:
        table.add_row("state of a request", "", format_bytes(answer.state_bytes), "")
    return table


def _brief(number: float) -> str:
    """Two significant figures or so, for the narrow columns of ranges."""
    if number >= 9950:
        return f"{number / 1000:.0f}k"
    if number >= 995:
        return f"{number / 1000:.1f}k"
    return f"{number:.1f}" if number < 9.95 else f"{number:.0f}"


def _band(band: Band, *, seconds: bool = False) -> str:
    if seconds:
        return f"{format_seconds(band.value)} ({format_seconds(band.low)}..{format_seconds(band.high)})"
    return f"{format_count(band.value)} ({format_count(band.low)}..{format_count(band.high)})"


def speed_part(findings: Findings, marks: Marks) -> Iterable[Text | Table]:
    """Prefill, the decode table, and the offload tier."""
    speed = findings.speed
    if speed is None:
        return
    yield Text("Speed: roofline with efficiency priors; ranges are their spread", style="bold")
    yield Text(
        f" prompt of {format_count(speed.prompt_tokens)}: TTFT {_band(speed.ttft_s, seconds=True)}, "
        f"{_band(speed.prefill_tokens_per_s)} tok/s"
    )
    bound = speed.compute_bound_batch
    yield Text(
        f" ridge {speed.ridge_flop_per_byte:.0f} FLOP/B in {speed.compute_format}; decode is bandwidth-bound "
        + (f"below batch {bound}" if bound else "at every batch up to 4096")
    )
    table = marks.table(f"decode, each with a context of {format_count(speed.decode[0].context)}")
    for name in ("batch", "TPOT ms", "range", "tok/s", "range", "bound by", "KV reads"):
        table.add_column(name, justify="left" if name == "bound by" else "right")
    for row in speed.decode:
        tpot, rate = row.tpot_s, row.tokens_per_s
        table.add_row(
            str(row.batch),
            f"{tpot.value * 1e3:.3g}",
            f"{_brief(tpot.low * 1e3)}..{_brief(tpot.high * 1e3)}",
            format_count(rate.value),
            f"{_brief(rate.low)}..{_brief(rate.high)}",
            row.bound,
            f"{row.kv_read_share:.0%}",
        )
    yield table
    if findings.offload is not None:
        report = findings.offload
        yield Text(
            f" a prefix of {format_count(report.prefix_tokens)} outside the GPU: {format_bytes(report.prefix_bytes)}, "
            f"recomputed in {format_seconds(report.recompute_s)}"
        )
        for tier in report.tiers:
            even = (
                "slower"
                if not tier.break_even_tokens
                else "always faster"
                if tier.break_even_tokens == 1
                else f"faster from {format_count(tier.break_even_tokens)} tokens on"
            )
            yield Text(f"   from {tier.name} ({tier.gb_s:g} GB/s): {format_seconds(tier.load_s)}, {even}")


def choices_table(choices: list[Choice], marks: Marks) -> Table:
    """One row per compared setup."""
    table = marks.table("Compared")
    for name in ("setup", "fits", "KV a GPU", "at once", "longest", "US$/h"):
        table.add_column(name, justify="left" if name in ("setup", "fits") else "right")
    for choice in choices:
        capacity = choice.answer.capacity if choice.answer else None
        if capacity is None:
            table.add_row(choice.label, "?", "", "", choice.problem or "no memory named", "")
            continue
        at_once = choice.users.max_users if choice.users else int(capacity.max_concurrency)
        table.add_row(
            choice.label,
            "yes" if choice.fits else "no",
            format_bytes(capacity.kv_bytes) if capacity.kv_bytes > 0 else "none",
            format_count(at_once),
            format_count(capacity.max_context_tokens),
            f"{choice.usd_per_hour:.2f}" if choice.usd_per_hour is not None else "",
        )
    return table


def recommended_part(choice: Choice) -> Iterable[Text]:
    """The cheapest fitting setup and its commands."""
    hardware = choice.request.hardware
    gpus = choice.request.parallel.gpus
    cost = f", about US$ {choice.usd_per_hour:.2f} an hour" if choice.usd_per_hour is not None else ""
    yield Text(f"Recommended: {gpus} x {hardware.name if hardware else 'this machine'}{cost}", style="bold green")
    for program in PROGRAMS:
        problem = obstacle(choice, program)
        if problem is not None:
            yield Text(f" {program}: not this one, {problem}")
            continue
        yield from (Text(line) for line in _pasteable(serve_command(choice, program)))


def _pasteable(command: str) -> list[str]:
    """A command over as many lines as it needs, such that a shell takes them for one."""
    lines = textwrap.wrap(command, PAGE_COLUMNS - 6, break_long_words=False, break_on_hyphens=False)
    ends = [" \\"] * (len(lines) - 1) + [""]
    return [f" {'  ' if i else ''}{line}{end}" for i, (line, end) in enumerate(zip(lines, ends, strict=True))]


def _unverified(answer: SizeAnswer) -> list[str]:
    hardware = answer.request.hardware
    if hardware is None:
        return []
    used = hardware.unverified & {"torch_total_gib", "bandwidth_gb_s", "fp16", "bf16", "fp8", "interconnect"}
    if not used:
        return []
    return [f"Unverified in the profile {hardware.id} (as of {hardware.as_of}): {', '.join(sorted(used))}."]
