"""Tiny random models of every served family, saved by transformers as ordinary model folders. No download.

Weights are drawn wider than at a real initialisation, so that attention is peaked and the best token stands well
clear of the second: a test of equal tokens then means equal computation, not luck with near ties.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import transformers

VOCAB_SIZE = 128
_SMALL: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN_ROPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@dataclass(frozen=True)
class TinyModel:
    """A name for test ids, and how transformers builds the config."""

    name: str
    make_config: Callable[[], Any]


def _llama(**changes: Any) -> Callable[[], Any]:
    return lambda: transformers.LlamaConfig(**{**_SMALL, **changes})


def _qwen2(**changes: Any) -> Callable[[], Any]:
    return lambda: transformers.Qwen2Config(**{**_SMALL, **changes})


def _qwen3(**changes: Any) -> Callable[[], Any]:
    return lambda: transformers.Qwen3Config(**{**_SMALL, "head_dim": 16, **changes})


def _mistral(**changes: Any) -> Callable[[], Any]:
    return lambda: transformers.MistralConfig(**{**_SMALL, **changes})


def _gemma3(**changes: Any) -> Callable[[], Any]:
    """2 full and 7 sliding layers: KV blocks of 2 layers, one full and four sliding groups, the last one padded."""
    small = {**_SMALL, "num_hidden_layers": 9, "head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 24}
    kinds = ["full_attention" if index in (3, 7) else "sliding_attention" for index in range(9)]
    return lambda: transformers.Gemma3TextConfig(
        **{**small, "layer_types": kinds, "tie_word_embeddings": False, **changes}
    )


LLAMA = TinyModel("llama", _llama())
GEMMA3 = TinyModel("gemma3", _gemma3())
GEMMA3_TIED = TinyModel(
    "gemma3-softcap",
    _gemma3(
        tie_word_embeddings=True,
        final_logit_softcapping=4.0,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
)
MISTRAL_SLIDING = TinyModel("mistral-sliding", _mistral(sliding_window=24))
QWEN3 = TinyModel("qwen3", _qwen3(tie_word_embeddings=True))

ALL: tuple[TinyModel, ...] = (
    LLAMA,
    TinyModel("llama-tied", _llama(tie_word_embeddings=True)),
    TinyModel("llama-biases", _llama(attention_bias=True, mlp_bias=True)),
    TinyModel("llama-one-kv-head", _llama(num_key_value_heads=1)),
    TinyModel("llama-linear-rope", _llama(rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 5e4})),
    TinyModel("llama-llama3-rope", _llama(rope_parameters={**_LLAMA3_ROPE, "rope_theta": 5e5})),
    TinyModel("llama-yarn-rope", _llama(rope_parameters={**_YARN_ROPE, "rope_theta": 1e4})),
    TinyModel("llama-yarn-mscale-rope", _llama(rope_parameters={**_YARN_ROPE, "mscale": 0.7, "mscale_all_dim": 1.1,
                                                                "truncate": False, "rope_theta": 1e4})),
    TinyModel("mistral-full", _mistral(sliding_window=None, head_dim=16)),
    MISTRAL_SLIDING,
    TinyModel("qwen2", _qwen2()),
    TinyModel("qwen2-sliding", _qwen2(use_sliding_window=True, sliding_window=24, max_window_layers=1)),
    QWEN3,
    TinyModel("qwen3-bias", _qwen3(attention_bias=True)),
    GEMMA3,
    GEMMA3_TIED,
)  # fmt: skip


def architecture(config: Any) -> str:
    """The name that save_pretrained writes into config.json for this kind of config."""
    return transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__


def build(tiny: TinyModel, seed: int = 0) -> Any:
    """Return the transformers model, float32, in evaluation mode."""
    torch.manual_seed(seed)
    config = tiny.make_config()
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.add_(torch.randn_like(parameter) * 0.2)
                if "post_" in name and config.model_type == "gemma3_text":
                    parameter.sub_(0.7)  # what a layer adds is normed there: let it not drown the token
            elif name.endswith("bias"):
                parameter.copy_(torch.randn_like(parameter) * 0.3)
            elif "embed" in name:
                # a tied output matrix finds the input token again if the layers add little to it: keep it small
                size = 0.01 if config.tie_word_embeddings else 1.0
                parameter.copy_(torch.randn_like(parameter) * size)
            else:
                parameter.copy_(torch.randn_like(parameter) * (1.5 / parameter.shape[1] ** 0.5))
    return model


def save(tiny: TinyModel, folder: Path, seed: int = 0, **save_options: Any) -> Any:
    """Build the model, write its folder, return the model."""
    model = build(tiny, seed)
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(folder, **save_options)
    return model


def write_config(folder: Path, config: dict[str, Any]) -> None:
    """Write config.json."""
    (folder / "config.json").write_text(json.dumps(config))


def write_renamed(source: Path, target: Path, rename: Callable[[str], str]) -> None:
    """Copy the weights of one folder to another under other names."""
    tensors = safetensors.torch.load_file(source / "model.safetensors")
    safetensors.torch.save_file({rename(name): t for name, t in tensors.items()}, target / "model.safetensors")
