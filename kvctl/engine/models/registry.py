"""Which architectures are served: the name in config.json -> the function that reads the rest of it.

Knows no torch, so that a command can ask before it loads anything. A new family is one function in
`families.py` and one row here. Floor 2.
"""

from collections.abc import Callable, Mapping
from typing import Any

from kvctl.engine.models import families
from kvctl.engine.models.decoder_config import DecoderConfig
from kvctl.errors import ModelBroken, ModelNotSupported

_FAMILIES: dict[str, Callable[[Mapping[str, Any], str], DecoderConfig]] = {
    "LlamaForCausalLM": families.llama,
    "MistralForCausalLM": families.mistral,
    "Qwen2ForCausalLM": families.qwen2,
    "Qwen3ForCausalLM": families.qwen3,
    "Gemma3ForCausalLM": families.gemma3_text,
    "Gemma3ForConditionalGeneration": families.gemma3_with_vision,
}
SUPPORTED_ARCHITECTURES: tuple[str, ...] = tuple(_FAMILIES)


def parse_decoder_config(config: Mapping[str, Any]) -> DecoderConfig:
    """Read the parsed config.json of a model.

    Raises:
        ModelNotSupported: an architecture or a feature that is not served here; the hint lists what is.
        ModelBroken: the file contradicts itself or lacks something.
    """
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise ModelBroken(
            f"config.json: 'architectures' is {names!r}, not a list with a name",
            hint="Use a model folder in Hugging Face format, e.g. one with LlamaForCausalLM there.",
        )
    parse = _FAMILIES.get(names[0])
    if parse is None:
        raise ModelNotSupported(
            f"the architecture {names[0]} is not supported",
            hint=f"Supported are {', '.join(SUPPORTED_ARCHITECTURES)}.",
        )
    try:
        return parse(config, names[0])
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise ModelBroken(f"config.json cannot be understood: {error}", hint="Download the model again.") from error
