"""Reading a config.json: one name per fact, whatever the model calls it, with clear errors.

Knows names of fields, no architecture. A vision-language or audio model nests the language model's fields in
`text_config` (or a name like it); they win over the outer ones. Floor 0.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvctl.errors import ModelBroken

MAX_LAYERS = 100_000  # a config with more is a mistake or an attack, not a model
_NESTED = ("text_config", "llm_config", "language_config", "thinker_config", "decoder", "language_model_config")
_ALIASES: dict[str, tuple[str, ...]] = {
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"),
    "num_attention_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"),
    "num_key_value_heads": (
        "num_key_value_heads",
        "num_kv_heads",
        "n_head_kv",
        "n_kv_heads",
        "num_attention_groups",
    ),
    "hidden_size": ("hidden_size", "n_embd", "d_model", "dim"),
    "intermediate_size": (
        "intermediate_size",
        "ffn_hidden_size",
        "ffn_dim",
        "n_inner",
        "d_ff",
        "decoder_ffn_dim",
    ),
    "head_dim": ("head_dim", "kv_channels", "d_kv", "attention_head_dim"),
    "vocab_size": ("padded_vocab_size", "vocab_size"),
    "num_experts": ("num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts", "num_moe_experts"),
    "num_experts_per_tok": (
        "num_experts_per_tok",
        "num_experts_per_token",
        "moe_topk",
        "moe_top_k",
        "top_k_experts",
        "moe_k",
    ),
    "moe_intermediate_size": ("moe_intermediate_size", "expert_ffn_hidden_size", "moe_ffn_hidden_size"),
    "n_shared_experts": ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"),
    "num_nextn_predict_layers": ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers"),
    "dtype": ("torch_dtype", "dtype"),
}
_LENGTHS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "model_max_length",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
    "n_ctx",
    "max_target_positions",
)


@dataclass(frozen=True, slots=True)
class ConfigView:
    """The facts of one config.json, the language model's own first."""

    fields: Mapping[str, Any]
    outer: Mapping[str, Any]

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "ConfigView":
        """Find the language model inside `config`.

        Raises:
            ModelBroken: `config` is not a JSON object.
        """
        if not isinstance(config, Mapping):
            raise ModelBroken(f"config.json holds a {type(config).__name__}, not an object", hint="Give a model's own.")
        inner: Mapping[str, Any] = config
        for _ in range(3):  # Qwen-Omni nests twice
            found = next((inner[k] for k in _NESTED if isinstance(inner.get(k), Mapping) and inner[k]), None)
            if found is None:
                break
            inner = found
        if inner is config:
            return cls(config, config)
        shared = {k: v for k, v in config.items() if k not in _NESTED and not isinstance(v, Mapping)}
        return cls({**shared, **inner}, config)

    @property
    def model_type(self) -> str:
        """The language model's type, '' when the config does not say."""
        value = self.fields.get("model_type")
        return value if isinstance(value, str) else ""

    @property
    def outer_model_type(self) -> str:
        """The whole model's type, '' when the config does not say."""
        value = self.outer.get("model_type")
        return value if isinstance(value, str) else ""

    @property
    def architecture(self) -> str:
        """The class that the checkpoint names, else its model type."""
        return next(iter(self.class_names), "") or self.outer_model_type or self.model_type or "unnamed"

    @property
    def class_names(self) -> list[str]:
        """The classes that the checkpoint names, the whole model's first."""
        listed = [source.get("architectures") for source in (self.outer, self.fields)]
        return [name for names in listed if isinstance(names, list) for name in names if isinstance(name, str) and name]

    def get(self, name: str) -> Any:
        """The first value that is not null under any spelling of `name`; None if there is none."""
        for spelling in _ALIASES.get(name, (name,)):
            value = self.fields.get(spelling)
            if value is not None:
                return value
        return None

    def optional_int(self, name: str) -> int | None:
        """A whole number of one or more, or None when absent.

        Raises:
            ModelBroken: something else stands there.
        """
        value = self.get(name)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1 or value > 10**12:
            raise ModelBroken(f"config.json says {name} = {value!r}", hint="It must be a whole number of 1 or more.")
        return value

    def count(self, name: str) -> int:
        """A whole number of zero or more; 0 when absent.

        Raises:
            ModelBroken: something else stands there.
        """
        value = self.get(name)
        if value is None or value == 0:
            return 0
        return self.optional_int(name) or 0

    def required_int(self, name: str) -> int:
        """A whole number of one or more.

        Raises:
            ModelBroken: absent, or something else stands there.
        """
        value = self.optional_int(name)
        if value is None:
            raise ModelBroken(f"config.json does not say {name}", hint="Give the model's full config.json.")
        return value

    def strings(self, name: str) -> list[str] | None:
        """A list of strings, or None when absent.

        Raises:
            ModelBroken: something else stands there.
        """
        value = self.fields.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise ModelBroken(f"config.json says {name} = {str(value)[:60]}", hint="It must be a list of names.")
        return value

    def ints(self, name: str) -> list[int] | None:
        """A list of whole numbers, or None when absent.

        Raises:
            ModelBroken: something else stands there.
        """
        value = self.fields.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, int) for item in value):
            raise ModelBroken(f"config.json says {name} = {str(value)[:60]}", hint="It must be a list of numbers.")
        return value

    def part(self, name: str) -> Mapping[str, Any]:
        """A nested object, {} when absent."""
        value = self.fields.get(name)
        return value if isinstance(value, Mapping) else {}

    @property
    def num_layers(self) -> int:
        """Decoder layers.

        Raises:
            ModelBroken: absent or absurd.
        """
        count = self.optional_int("num_hidden_layers")
        if count is None:
            listed = self.strings("layers_block_type") or self.strings("layer_types")
            if listed:
                return len(listed)
            pattern = self.fields.get("hybrid_override_pattern")
            if isinstance(pattern, str) and pattern:
                return len(pattern)
            count = self.required_int("num_hidden_layers")
        if count > MAX_LAYERS:
            raise ModelBroken(f"config.json says {count:,} layers", hint="Check num_hidden_layers.")
        return count

    @property
    def num_heads(self) -> int:
        """Query heads."""
        nested = self.part("attn_config").get("n_heads")  # MPT, DBRX keep some facts there
        if self.get("num_attention_heads") is None and isinstance(nested, int):
            return nested
        return self.required_int("num_attention_heads")

    @property
    def head_dim(self) -> int:
        """Elements of one key head: as given, else hidden size over heads.

        Raises:
            ModelBroken: not given, and the heads do not divide the hidden size.
        """
        given = self.optional_int("head_dim")
        if given is not None:
            return given
        hidden, heads = self.required_int("hidden_size"), self.num_heads
        if hidden % heads:
            raise ModelBroken(
                f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}",
                hint="The config must then give head_dim.",
            )
        return hidden // heads

    @property
    def num_kv_heads(self) -> int:
        """Key/value heads: MQA and old spellings included; as many as query heads when not said."""
        fields = self.fields
        if self.model_type in ("falcon", "RefinedWeb", "RefinedWebModel"):
            if fields.get("new_decoder_architecture"):
                return self.optional_int("num_key_value_heads") or self.num_heads
            return 1 if fields.get("multi_query", True) else self.num_heads
        if "multi_query_attention" in fields or "multi_query_group_num" in fields:  # ChatGLM
            return (
                (self.optional_int("multi_query_group_num") or 1)
                if fields.get("multi_query_attention", True)
                else self.num_heads
            )
        if fields.get("multi_query") is True:  # GPT-BigCode
            return 1
        for nested in (self.part("attn_config").get("kv_n_heads"),):
            if isinstance(nested, int) and nested > 0:
                return nested
        given = self.optional_int("num_key_value_heads")
        if given is not None and self.get("num_attention_heads") is None:
            return given
        heads = self.num_heads
        kv_heads = given or heads
        if heads % kv_heads:
            raise ModelBroken(
                f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}",
                hint="Every key/value head must serve the same number of query heads.",
            )
        return kv_heads

    @property
    def dtype(self) -> str:
        """The checkpoint's own number format, 'bfloat16' when it does not say."""
        value = self.get("dtype")
        if not isinstance(value, str):
            value = self.outer.get("torch_dtype") or self.outer.get("dtype")
        return value.removeprefix("torch.") if isinstance(value, str) and value not in ("auto", "") else "bfloat16"

    @property
    def max_model_len(self) -> int | None:
        """The longest context that the model was made for, with its RoPE scaling; None when it does not say.

        Source: the rule of vLLM's `_get_and_verify_max_len`: YaRN scales the original length, other linear
        or dynamic scalings the given one; llama3, longrope and mrope are already in the given one.
        """
        given = [v for v in (self.fields.get(k) for k in _LENGTHS) if isinstance(v, int) and v > 0]
        if not given:
            return None
        length = min(given)
        scaling = self.fields.get("rope_scaling") or self.fields.get("rope_parameters")
        if not isinstance(scaling, Mapping):
            return length
        kind = scaling.get("rope_type") or scaling.get("type")
        factor = scaling.get("factor")
        if kind in ("yarn", "linear", "dynamic") and isinstance(factor, int | float) and factor > 1:
            original = scaling.get("original_max_position_embeddings")
            if kind == "yarn" and isinstance(original, int):
                length = original
            length = int(length * factor)
        return length
