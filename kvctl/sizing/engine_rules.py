"""Which engine, which version, which rules: how each one prices a layer, cuts blocks and prints its capacity.

Knows names, versions and switches only; the arithmetic is in capacity.py. Every switch names the version it
changed in and where that was seen. Floor 1.
"""

import re
from dataclasses import dataclass
from typing import Literal

from kvctl.errors import ConfigError

EngineName = Literal["kvctl", "vllm", "sglang", "llama.cpp", "trtllm", "ideal"]
ENGINES: tuple[EngineName, ...] = ("kvctl", "vllm", "sglang", "llama.cpp", "trtllm", "ideal")
_SPELLINGS = {"llamacpp": "llama.cpp", "tensorrt-llm": "trtllm", "tensorrt_llm": "trtllm", "trt-llm": "trtllm"}
Version = tuple[int, ...]
PINNED_VLLM: Version = (0, 24)  # the newest version that a printed log pins; what vllm without a version means
NEWEST_VLLM: Version = (0, 28)  # the newest version whose rules were read
OLDEST_VLLM: Version = (0, 1)


@dataclass(frozen=True, slots=True)
class EngineRules:
    """The switches of one engine at one version."""

    name: EngineName
    version: Version
    block_size: int  # tokens, when the user does not say
    latent_block_size: int  # tokens, for models with MLA of DeepSeek's size
    groups_layers: bool  # windowed and recurrent layers have block tables of their own
    chunked_as_full: bool  # Llama 4's chunked layers keep every token
    counts_part_blocks: bool  # concurrency is tokens over max_model_len, not blocks over whole blocks
    tokens_are_concurrency: bool  # capacity is printed as concurrency * max_model_len
    reserves_null_block: bool  # the fit check leaves the null block out
    fit_counts_groups: bool  # the fit check counts whole blocks of padded groups, not the pages of each layer
    fit_counts_all_stages: bool  # under PP, the fit check sets all layers against one stage's memory
    steps_in_flight: int  # steps whose tokens a window must hold beside itself
    takes_checkpoint_kv_dtype: bool  # 'auto' is FP8 where the checkpoint carries scales for it
    recurrent_blocks: int  # blocks of a recurrent group for one request, when the user does not say
    estimates_graphs: bool  # CUDA graphs are part of the budget
    sorts_logits: bool  # sampling sorts the whole vocabulary, which takes twice the memory
    is_v0: bool  # vLLM before 0.8: swap space, whole-length profiling
    compressed_packing: Literal["rows", "columns", "dense"] = "rows"  # how DeepSeek V4's pages share a block
    note: str = ""  # what a user of this version should know

    @property
    def label(self) -> str:
        """'vllm@0.10.2', or the bare name when no version was given or none matters."""
        return f"{self.name}@{'.'.join(map(str, self.version))}" if self.version else self.name


def parse_engine(text: str) -> tuple[EngineName, Version]:
    """Split 'vllm@0.10.2' into its name and one to three numbers; no version: ().

    Raises:
        ConfigError: an engine or a version that is none.
    """
    name, at, version = text.strip().partition("@")
    name = _SPELLINGS.get(name.lower(), name.lower())
    engine = next((e for e in ENGINES if e == name), None)
    if engine is None:
        raise ConfigError(
            f"--engine is {text!r}", hint=f"Choose one of {', '.join(ENGINES)}; vllm@0.10.2 for a version."
        )
    if not at:
        return engine, ()
    if not re.fullmatch(r"v?\d{1,6}(\.\d{1,6}){0,2}", version):
        raise ConfigError(f"--engine is {text!r}", hint="A version has one to three numbers, like vllm@0.10.2.")
    if engine == "ideal":
        raise ConfigError(f"--engine is {text!r}", hint="ideal has no versions.")
    return engine, tuple(int(part) for part in version.removeprefix("v").split("."))


def engine_rules(text: str) -> EngineRules:
    """The rules of an engine and version as written on the command line.

    Raises:
        ConfigError: an engine or a version that is none.
    """
    name, given = parse_engine(text)
    return _vllm_rules(given) if name == "vllm" else _other_rules(name, given)


def _vllm_rules(given: Version) -> EngineRules:
    """vLLM, version by version; two numbers mean the first release of that minor.

    Source: printed logs in tests/data/sizing (0.2.1 to 0.24), release notes and the changes named here.
    """
    version, note = _known_version(given)
    return EngineRules(
        name="vllm",
        version=given,
        block_size=16,
        latent_block_size=64 if version >= (0, 8) else 16,  # FlashMLA since 0.8
        groups_layers=version >= (0, 9, 1),  # the hybrid KV cache manager (#17996)
        chunked_as_full=version < (0, 9, 2) or (0, 10, 1) <= version < (0, 13),  # #19351, #21761, #29627
        counts_part_blocks=version < (0, 9, 1),  # log jetson-qwen2-7b-gguf
        tokens_are_concurrency=version >= (0, 21),  # issue 54662; four logs of 0.24 exact
        reserves_null_block=version >= (0, 21),
        fit_counts_groups=version >= (0, 14),  # #29431
        fit_counts_all_stages=(0, 14) <= version < (0, 16),  # came with #29431, mended by #33698; issue 34076
        steps_in_flight=2 if version >= (0, 26) else 1,  # #47728: with async scheduling a second step is under way
        takes_checkpoint_kv_dtype=version >= (0, 14),  # #29980
        recurrent_blocks=2 if version >= (0, 21) else 1,  # see mamba_blocks_per_request
        estimates_graphs=version >= (0, 21),
        sorts_logits=version < (0, 16),
        is_v0=version < (0, 8),
        compressed_packing="rows" if version < (0, 23) else "columns" if version < (0, 26) else "dense",  # 44454, 48993
        note=note,
    )


def _known_version(given: Version) -> tuple[Version, str]:
    """The version whose rules count, and a note where that is not the one asked for."""
    if not given:
        return PINNED_VLLM, ""
    asked = ".".join(map(str, given))
    if given > (*NEWEST_VLLM, 999_999) or len(given) == 1:
        newest = ".".join(map(str, NEWEST_VLLM))
        why = f"is newer than {newest}" if given > NEWEST_VLLM else "names no release"
        return NEWEST_VLLM, f"vLLM {asked} {why}: the rules of {newest}, the newest known here, are used."
    if given < OLDEST_VLLM:
        oldest = ".".join(map(str, OLDEST_VLLM))
        return OLDEST_VLLM, f"vLLM {asked} was never released: the rules of {oldest} are used."
    return given, ""


def _other_rules(name: EngineName, given: Version) -> EngineRules:
    sizes = {"kvctl": 16, "sglang": 1, "llama.cpp": 1, "trtllm": 64 if given and given < (0, 18) else 32, "ideal": 1}
    is_kvctl = name == "kvctl"
    return EngineRules(
        name=name,
        version=given,
        block_size=sizes[name],
        latent_block_size=sizes[name],
        groups_layers=is_kvctl or name == "llama.cpp",
        chunked_as_full=not is_kvctl,
        counts_part_blocks=not is_kvctl,
        tokens_are_concurrency=is_kvctl,
        reserves_null_block=is_kvctl,
        fit_counts_groups=True,
        fit_counts_all_stages=False,
        steps_in_flight=1,
        takes_checkpoint_kv_dtype=False,
        recurrent_blocks=2,
        estimates_graphs=is_kvctl,
        sorts_logits=False,
        is_v0=False,
    )


def latent_bytes(rules: EngineRules, *, entry_elements: int, num_heads_per_gpu: int, element_bytes: int) -> int | None:
    """Bytes of one MLA entry where an old vLLM did not store the bare latent; None where it does.

    The releases of 0.7 from 0.7.1 padded an entry to a multiple of 256 bytes (576 -> 640 elements of 16 bits); builds
    called 0.7.4, which became 0.8, do not any more. Before MLA support (0.7.1) the model was stored as whole heads,
    192 elements padded to 256. Source: logs r1-tp8-v0-align, r1-align-off, deepseek-v3-nomla.
    """
    version = rules.version
    if rules.name != "vllm" or not rules.is_v0 or version >= (0, 7, 4):
        return None
    if version >= (0, 7) and version != (0, 7, 0):
        return -(-entry_elements * element_bytes // 256) * 256
    return num_heads_per_gpu * 256 * 2 * element_bytes


def keeps_every_state(rules: EngineRules, prefix_caching: bool | None, mixer: str) -> bool:
    """Whether a state is kept for every block of tokens: Mamba 2 with prefix caching, in vLLM from 0.11.1 to 0.26.

    Source: #25752 brought that mode ('all'), #50991 made 'align' the one for all models.
    """
    is_then = rules.name == "vllm" and (0, 11, 1) <= (rules.version or PINNED_VLLM) < (0, 27)
    return is_then and mixer == "mamba2" and bool(prefix_caching)


def mamba_blocks_per_request(rules: EngineRules, prefix_caching: bool | None) -> int:
    """Blocks that a recurrent group holds for one request: the state, and one more to restart from a prefix.

    vLLM keeps the second with prefix caching ('align' mode, from 0.15 on; before, it switched the caching off). On
    hybrids that is its default since 0.27 (#50991); from 0.21 on all logs known here ran with it, before that a log
    without it counts one (issue 40691). An explicit choice wins.
    """
    if prefix_caching is None:
        return rules.recurrent_blocks
    knows_align = rules.name != "vllm" or (rules.version or PINNED_VLLM) >= (0, 15)
    return 2 if prefix_caching and knows_align else 1
