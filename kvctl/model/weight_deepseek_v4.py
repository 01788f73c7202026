"""Parameters of DeepSeek V4: low-rank queries and outputs, compressors with an indexer, experts, hyper-connections.

Knows the matrices of transformers' DeepseekV4Model; counts are compared with it in the tests. Floor 0.
"""

from kvctl.model.config_view import ConfigView
from kvctl.model.layer_shape import LayerShape
from kvctl.model.weight_traits import WeightPart

_FINE = 4  # the compression ratio whose parts overlap and that has an indexer


def outside_layers(view: ConfigView) -> list[WeightPart]:
    """What joins the streams of the hyper-connections before the head."""
    streams = view.optional_int("hc_mult") or 4
    return [WeightPart("hyper head", (streams * view.required_int("hidden_size") + 1) * streams + 1, "whole", False)]


def layer_parts(view: ConfigView, layer: LayerShape) -> list[WeightPart]:
    """One decoder layer."""
    hidden, heads, dim, index = view.required_int("hidden_size"), view.num_heads, view.head_dim, layer.index
    rank = view.required_int("q_lora_rank")
    output_rank = (view.optional_int("o_groups") or 8) * (view.optional_int("o_lora_rank") or 1024)
    streams = view.optional_int("hc_mult") or 4
    mixed = (streams + 2) * streams  # what a hyper-connection computes for each token
    count, width = view.required_int("num_experts"), view.required_int("moe_intermediate_size")
    one_group = (view.optional_int("o_lora_rank") or 1024) * heads * dim
    parts = [
        WeightPart("norms", 2 * hidden + rank + dim, "whole", False, index),
        WeightPart("sinks", heads, "split", False, index),
        WeightPart("query down", hidden * rank, "whole", True, index),
        WeightPart("query up", rank * heads * dim, "split", True, index),
        WeightPart("latent down", hidden * dim, "whole", True, index),
        WeightPart("attention o", one_group + output_rank * hidden, "split", True, index),
        WeightPart("hyper-connections", 2 * (mixed * (streams * hidden + 1) + 3), "whole", False, index),
        WeightPart("experts", count * 3 * hidden * width, "experts", True, index),
        WeightPart("router", count * hidden, "whole", False, index),
        WeightPart("shared expert", 3 * hidden * width * view.count("n_shared_experts"), "split", True, index),
    ]
    if layer.compress_ratio:
        parts.append(_compressor(layer.compress_ratio, hidden, dim, index))
    if layer.compress_ratio == _FINE:
        size, indexers = view.required_int("index_head_dim"), view.required_int("index_n_heads")
        parts.append(_compressor(_FINE, hidden, size, index))
        parts.append(WeightPart("indexer", indexers * (size * rank + hidden), "whole", True, index))
    return parts


def _compressor(ratio: int, hidden: int, dim: int, index: int) -> WeightPart:
    wide = dim * (2 if ratio == _FINE else 1)
    return WeightPart("compressor", 2 * hidden * wide + ratio * wide + dim, "whole", True, index)
