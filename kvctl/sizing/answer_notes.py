"""Lines that qualify an answer: what was padded, estimated, left out or is beyond the model. Floor 1."""

from dataclasses import dataclass

from kvctl.errors import ModelNotSupported
from kvctl.model.layer_shape import LayerKind
from kvctl.model.model_shape import ModelShape
from kvctl.model.weight_formats import has_fp8_kv_scales
from kvctl.model.weight_size import Parallelism, WeightSize
from kvctl.sizing.capacity import Pool
from kvctl.sizing.engine_rules import NEWEST_VLLM, PINNED_VLLM, EngineRules


@dataclass(frozen=True, slots=True)
class Asked:
    """The choices that a note may question."""

    kv_dtype: str
    max_model_len: int | None
    prefix_caching: bool | None


def answer_notes(
    shape: ModelShape,
    rules: EngineRules,
    parallel: Parallelism,
    pool: Pool | None,
    weights: WeightSize | None,
    pool_error: ModelNotSupported | None,
    asked: Asked,
) -> tuple[str, ...]:
    """What a reader of the answer should know beside it."""
    notes = list(shape.notes)
    if rules.note:
        notes.append(rules.note)
    notes += _about_versions(rules, pool, asked)
    if pool is not None:
        notes += pool.notes
    if weights is not None:
        notes += weights.notes
    if pool_error is not None:
        notes.append(pool_error.message)
    if shape.num_draft_layers:
        notes.append(f"{shape.num_draft_layers} draft (MTP) layer(s) are not loaded without speculative decoding.")
    if asked.kv_dtype == "auto" and has_fp8_kv_scales(shape.view):
        taken = "auto is fp8 here" if rules.takes_checkpoint_kv_dtype else "vLLM from 0.14 on takes fp8 for auto"
        notes.append(f"The checkpoint carries FP8 KV scales: {taken}.")
    own, length = shape.max_model_len, asked.max_model_len
    if own is not None and length is not None and length > own:
        notes.append(f"--max-model-len {length:,} is beyond the model's own {own:,}.")
    if rules.fit_counts_all_stages and parallel.pipeline > 1:
        notes.append("This version checks all layers against one stage's memory (vLLM issue 34076).")
    return tuple(notes)


def _about_versions(rules: EngineRules, pool: Pool | None, asked: Asked) -> list[str]:
    """What the answer takes for granted about vLLM's version or defaults."""
    if rules.name != "vllm" or pool is None:
        return []
    notes = []
    if not rules.version and any(g.window_tokens is not None for g in pool.groups):
        pinned, newest = (".".join(map(str, v)) for v in (PINNED_VLLM, NEWEST_VLLM))
        notes.append(
            f"vllm without a version follows {pinned}, the newest that printed logs pin; from 0.26 on windowed layers "
            f"are charged more (--engine vllm@{newest})."
        )
    is_opt_in = (0, 21) <= (rules.version or PINNED_VLLM) < (0, 27)
    if asked.prefix_caching is None and is_opt_in and any(g.kind is LayerKind.STATE for g in pool.groups):
        notes.append(
            "Counted with prefix caching, two state blocks a request: give --enable-prefix-caching to the server, or "
            "--no-enable-prefix-caching here."
        )
    return notes
