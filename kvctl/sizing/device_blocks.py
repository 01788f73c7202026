"""Block sizes that an engine takes from the device: what its attention kernels can address.

Knows profiles and shapes; the blocks themselves are cut in capacity.py. Floor 1.
"""

from math import lcm

from kvctl.model.hardware import HardwareProfile
from kvctl.model.layer_shape import LayerKind
from kvctl.model.model_shape import ModelShape
from kvctl.sizing.capacity import STATE_ALIGN
from kvctl.sizing.engine_rules import EngineRules, keeps_every_state

_FLASH_MLA_ELEMENTS = 576  # the entry of DeepSeek's models, the only one that FlashMLA takes
_SERVER_BLACKWELL = frozenset({"blackwell", "blackwell-ultra"})  # not the GeForce and PRO cards
_LATENT_ALIGN = 64
_LARGE_BLOCK = 128
_MAMBA2_CHUNK = 256  # transformers' default
_TPU_SHARE, _TPU_LEAST, _TPU_MOST = 16, 16, 256


def default_block_tokens(
    shape: ModelShape, rules: EngineRules, hardware: HardwareProfile | None, max_model_len: int
) -> int:
    """Tokens a block, when the user does not say.

    Latents of DeepSeek's size: 64 with FlashMLA (Hopper, server Blackwell; taken where no device is named), which
    sparse attention (DSA) always uses; other devices keep the engine's own. TPUs: a sixteenth of the length, as a power
    of two from 16 to 256 (vLLM's PallasAttentionBackend; a log estimates 5,632 tokens where blocks of 16 give 5,808).
    CPUs and Gaudi: 128 (the scrape of a vLLM on a CPU in tests/data/top).
    """
    vendor = hardware.vendor if hardware is not None and rules.name == "vllm" else ""
    if vendor == "google":
        power = 1 << (max_model_len - 1).bit_length()
        return min(_TPU_MOST, max(_TPU_LEAST, power // _TPU_SHARE))
    if vendor in ("cpu", "intel") and not rules.is_v0:
        return _LARGE_BLOCK
    latent = next((layer for layer in shape.layers if layer.kind is LayerKind.MLA), None)
    if latent is None or latent.key_dim != _FLASH_MLA_ELEMENTS:
        return rules.block_size
    has_kernel = hardware is None or hardware.arch in {"hopper", *_SERVER_BLACKWELL} or latent.is_sparse
    return rules.latent_block_size if has_kernel else rules.block_size


def state_alignment(
    shape: ModelShape, rules: EngineRules, hardware: HardwareProfile | None, prefix_caching: bool | None
) -> int:
    """What the attention block of a model with recurrent layers is a multiple of.

    64 for latents; 32 for heads of 256 elements on data-centre Blackwell, whose kernels take no blocks of 16 there
    (vLLM 0.11 on; FlashInfer issue 1993); the kernel's chunk where a state is kept for every block; else 16.
    """
    if any(keeps_every_state(rules, prefix_caching, layer.label) for layer in shape.layers):
        chunk = shape.view.optional_int("mamba_chunk_size") or shape.view.optional_int("chunk_size") or _MAMBA2_CHUNK
        return lcm(chunk, STATE_ALIGN)
    if any(layer.kind is LayerKind.MLA for layer in shape.layers):
        return _LATENT_ALIGN
    has_wide_heads = any(layer.kind is LayerKind.FULL and layer.key_dim == 256 for layer in shape.layers)
    if rules.name == "vllm" and hardware is not None and hardware.arch in _SERVER_BLACKWELL and has_wide_heads:
        return 2 * STATE_ALIGN
    return STATE_ALIGN
