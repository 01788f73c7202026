"""What holds where a request says nothing: the model's generation config; and the limits no request may pass.

Knows no request. Imports no pydantic: it is read before the engine starts. Floor 3.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvctl.core.sampling_params import SamplingParams
from kvctl.errors import ConfigError, InvalidRequest

# the keys of a generation config that vLLM takes over as defaults; eos_token_id is read with the model's facts
_GENERATION_CONFIG_KEYS: Final = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What holds where a request says nothing."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_new_tokens: int | None = None  # from the generation config: a limit on every request's output

    @classmethod
    def from_generation_config(cls, config: Mapping[str, Any]) -> "SamplingDefaults":
        """Take over what the model's authors recommend.

        Raises:
            ConfigError: a value that is no number.
        """
        values = {key: config[key] for key in _GENERATION_CONFIG_KEYS if config.get(key) is not None}
        if config.get("max_new_tokens") is not None:
            values["max_new_tokens"] = config["max_new_tokens"]
        for key, value in values.items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ConfigError(f"the generation config has {key} = {value!r}", hint="It must be a number.")
        defaults = cls(**values)
        try:
            SamplingParams(**defaults.as_params())
        except InvalidRequest as error:
            raise ConfigError(f"the generation config is impossible: {error.message}") from None
        return defaults

    def as_params(self) -> dict[str, Any]:
        """Return the fields that `SamplingParams` has too."""
        return {key: getattr(self, key) for key in _GENERATION_CONFIG_KEYS}


@dataclass(frozen=True, slots=True)
class SamplingLimits:
    """What the served model and the operator allow."""

    max_model_len: int  # tokens
    vocab_size: int
    max_logprobs: int = 20  # -1: no limit
