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
NEWEST_VLLM = (0, 24)  # the newest version that a log pins
Version = tuple[int, ...]


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
    fit_counts_all_stages: bool  # under PP, the fit check sets all layers against one stage's memory
    estimates_graphs: bool  # CUDA graphs are part of the budget
    sorts_logits: bool  # sampling sorts the whole vocabulary, which takes twice the memory
    is_v0: bool  # vLLM before 0.8: swap space, whole-length profiling

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

    Source of the version marks: printed logs in tests/data/sizing (0.2.1 to 0.24) and the code of those versions.

    Raises:
        ConfigError: an engine or a version that is none.
    """
    name, given = parse_engine(text)
    if name == "vllm":
        version = given or NEWEST_VLLM
        return EngineRules(
            name=name,
            version=given,
            block_size=16,
            latent_block_size=64 if version >= (0, 8) else 16,  # FlashMLA since 0.8
            groups_layers=version >= (0, 9, 2),  # the hybrid KV cache manager; gemma-3 logs of 0.11 and 0.13
            chunked_as_full=version < (0, 18),  # off by default for chunked layers; Llama 4 log of 0.8/0.9
            counts_part_blocks=version < (0, 9, 2),  # log jetson-qwen2-7b-gguf
            tokens_are_concurrency=version >= (0, 21),  # issue 54662; four logs of 0.24 exact
            reserves_null_block=version >= (0, 21),
            fit_counts_all_stages=(0, 8) <= version < (0, 17),  # issue 34076, log of 0.15.2
            estimates_graphs=version >= (0, 21),
            sorts_logits=version < (0, 16),
            is_v0=version < (0, 8),
        )
    defaults = {"kvctl": 16, "sglang": 1, "llama.cpp": 1, "trtllm": 32 if given >= (0, 18) else 64, "ideal": 1}
    is_kvctl = name == "kvctl"
    return EngineRules(
        name=name,
        version=given,
        block_size=defaults[name],
        latent_block_size=defaults[name],
        groups_layers=is_kvctl or name == "llama.cpp",
        chunked_as_full=not is_kvctl,
        counts_part_blocks=not is_kvctl,
        tokens_are_concurrency=is_kvctl,
        reserves_null_block=is_kvctl,
        fit_counts_all_stages=False,
        estimates_graphs=is_kvctl,
        sorts_logits=False,
        is_v0=False,
    )


def latent_bytes(rules: EngineRules, *, entry_elements: int, num_heads_per_gpu: int, element_bytes: int) -> int | None:
    """Bytes of one MLA entry where an old vLLM did not store the bare latent; None where it does.

    0.7 padded an entry to a multiple of 256 bytes (576 -> 640 elements of 16 bits); before MLA support (0.6) the
    model was stored as whole heads, 192 elements padded to 256. Source: logs r1-tp8-v0-align, deepseek-v3-nomla.
    """
    if rules.name != "vllm" or not rules.is_v0 or not rules.version:
        return None
    if rules.version >= (0, 7):
        return -(-entry_elements * element_bytes // 256) * 256
    return num_heads_per_gpu * 256 * 2 * element_bytes


def mamba_blocks_per_request(rules: EngineRules, prefix_caching: bool | None) -> int:
    """Blocks that a recurrent group holds for one request: the state, and one more to restart from a prefix.

    'align' mode (prefix caching) keeps two. Default on since Qwen3.5 support; explicit choice always wins.
    """
    default = rules.name != "vllm" or not rules.version or rules.version >= (0, 18)
    return 2 if (default if prefix_caching is None else prefix_caching) else 1
