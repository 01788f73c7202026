"""Which tensors a decoder holds in memory, and which tensors of the checkpoint each one is packed from.

Knows names and shapes only: no torch, no file. Packing is concatenation along the output dimension: q, k and v
become one matrix, gate and up another, so that a layer costs four matrix products. Floor 2.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from kvctl.engine.models.decoder_config import DecoderConfig


@dataclass(frozen=True, slots=True)
class TensorPart:
    """One tensor of the checkpoint."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """One tensor in memory: its parts one after another along dimension 0. `is_norm`: a norm's weight."""

    key: str
    parts: tuple[TensorPart, ...]
    is_norm: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole."""
        return (sum(part.shape[0] for part in self.parts), *self.parts[0].shape[1:])

    @property
    def num_elements(self) -> int:
        """Of the whole."""
        total = 1
        for length in self.shape:
            total *= length
        return total


def embedding_tensor(config: DecoderConfig) -> PackedTensor:
    """The token embedding [vocab_size, hidden_size]."""
    shape = (config.vocab_size, config.hidden_size)
    return PackedTensor("embedding", (TensorPart(f"{config.name_prefix}embed_tokens.weight", shape),))


def final_norm_tensor(config: DecoderConfig) -> PackedTensor:
    """The norm after the last layer [hidden_size]."""
    return PackedTensor("norm", (TensorPart(f"{config.name_prefix}norm.weight", (config.hidden_size,)),), is_norm=True)


def lm_head_tensor(config: DecoderConfig) -> PackedTensor | None:
    """The output matrix [vocab_size, hidden_size]; None where it is the embedding."""
    if config.tie_word_embeddings:
        return None
    name = config.name_prefix.removesuffix("model.") + "lm_head.weight"
    return PackedTensor("lm_head", (TensorPart(name, (config.vocab_size, config.hidden_size)),))


def layer_tensors(config: DecoderConfig, layer: int) -> dict[str, PackedTensor]:
    """The tensors of one layer by their short name; biases and extra norms only where the model has them."""
    prefix = f"{config.name_prefix}layers.{layer}."
    hidden, intermediate = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.query_size, config.kv_size

    def packed(short: str, *parts: tuple[str, tuple[int, ...]], is_norm: bool = False) -> PackedTensor:
        named = tuple(TensorPart(prefix + name, shape) for name, shape in parts)
        return PackedTensor(f"layers.{layer}.{short}", named, is_norm)

    def norm(short: str, name: str, length: int = hidden) -> PackedTensor:
        return packed(short, (f"{name}.weight", (length,)), is_norm=True)

    qkv = (("self_attn.q_proj", q_size), ("self_attn.k_proj", kv_size), ("self_attn.v_proj", kv_size))
    gate_up = (("mlp.gate_proj", intermediate), ("mlp.up_proj", intermediate))
    tensors = {
        "input_norm": norm("input_norm", "input_layernorm"),
        "qkv": packed("qkv", *((f"{name}.weight", (size, hidden)) for name, size in qkv)),
        "output": packed("output", ("self_attn.o_proj.weight", (hidden, q_size))),
        "gate_up": packed("gate_up", *((f"{name}.weight", (size, hidden)) for name, size in gate_up)),
        "down": packed("down", ("mlp.down_proj.weight", (hidden, intermediate))),
    }
    if config.qkv_bias:
        tensors["qkv_bias"] = packed("qkv_bias", *((f"{name}.bias", (size,)) for name, size in qkv))
    if config.output_bias:
        tensors["output_bias"] = packed("output_bias", ("self_attn.o_proj.bias", (hidden,)))
    if config.mlp_bias:
        tensors["gate_up_bias"] = packed("gate_up_bias", *((f"{name}.bias", (size,)) for name, size in gate_up))
        tensors["down_bias"] = packed("down_bias", ("mlp.down_proj.bias", (hidden,)))
    if config.qk_norm:
        tensors["q_norm"] = norm("q_norm", "self_attn.q_norm", config.head_dim)
        tensors["k_norm"] = norm("k_norm", "self_attn.k_norm", config.head_dim)
    if config.sandwich_norms:
        tensors["attention_out_norm"] = norm("attention_out_norm", "post_attention_layernorm")
        tensors["mlp_norm"] = norm("mlp_norm", "pre_feedforward_layernorm")
        tensors["mlp_out_norm"] = norm("mlp_out_norm", "post_feedforward_layernorm")
    else:
        tensors["mlp_norm"] = norm("mlp_norm", "post_attention_layernorm")
    return tensors


def all_tensors(config: DecoderConfig) -> Iterator[PackedTensor]:
    """Every tensor of the model, in the order in which it is loaded."""
    yield embedding_tensor(config)
    for layer in range(config.num_layers):
        yield from layer_tensors(config, layer).values()
    yield final_norm_tensor(config)
    head = lm_head_tensor(config)
    if head is not None:
        yield head
