"""What changed between versions of vLLM, each against a number that a server printed or against counting by hand."""

from typing import Any

import pytest

from kvctl.model.hardware import find_hardware
from kvctl.model.model_shape import ModelShape
from kvctl.model.weight_size import Parallelism
from kvctl.sizing.capacity import Capacity
from kvctl.sizing.request import SizeAnswer, SizedModel, SizeRequest, size_up
from kvctl.sizing.sized_model import load_model
from kvctl.units import GIB

QWEN3_NEXT: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "hidden_size": 2048,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 262_144,
    "torch_dtype": "bfloat16",
}
NEMOTRON_NANO_9B: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "num_hidden_layers": 56,
    "hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_size": 4480,
    "mamba_num_heads": 128,
    "mamba_head_dim": 80,
    "ssm_state_size": 128,
    "n_groups": 8,
    "conv_kernel": 4,
    "mamba_ssm_cache_dtype": "float32",
    "torch_dtype": "bfloat16",
}


def ask(model: str | dict[str, Any], version: str = "", **choices: Any) -> SizeAnswer:
    sized = load_model(model) if isinstance(model, str) else SizedModel("m", ModelShape.from_config(model), "test")
    return size_up(SizeRequest(sized, f"vllm@{version}" if version else "vllm", **choices))


def held(answer: SizeAnswer) -> Capacity:
    assert answer.capacity is not None
    return answer.capacity


def block_tokens(answer: SizeAnswer) -> int:
    assert answer.pool is not None
    return answer.pool.block_tokens


def with_blocks(answer: SizeAnswer, num_blocks: int) -> Capacity:
    """The same question with memory for so many blocks."""
    assert answer.pool is not None
    request = answer.request
    return held(size_up(SizeRequest(**{**fields(request), "kv_bytes": num_blocks * answer.pool.block_bytes})))


def fields(request: SizeRequest) -> dict[str, Any]:
    return {name: getattr(request, name) for name in request.__dataclass_fields__}


def test_a_hybrid_counts_one_state_block_before_021_and_two_with_prefix_caching() -> None:
    """vLLM 0.19.0 printed 290,864 tokens and 33.04x for Qwen3.5-27B at 32,768 (issue 40691): 1,487 / (42 + 3)."""
    found = with_blocks(ask("Qwen/Qwen3.5-27B", "0.19.0", max_model_len=32_768), 1487)
    assert (found.kv_tokens, round(found.max_concurrency, 2)) == (290_864, 33.04)
    two = with_blocks(ask("Qwen/Qwen3.5-27B", "0.19.0", max_model_len=32_768, prefix_caching=True), 1487)
    assert two.max_concurrency == pytest.approx(1487 / (42 + 3 * 2))
    later = ask("Qwen/Qwen3.5-27B", "0.24", max_model_len=32_768)
    assert with_blocks(later, 1487).max_concurrency == two.max_concurrency
    assert any("--no-enable-prefix-caching" in note for note in later.notes)
    assert not any("prefix-caching" in note for note in ask("Qwen/Qwen3.5-27B", "0.27").notes)


def test_qwen3_next_with_an_fp8_cache_has_blocks_of_1072_tokens() -> None:
    """vLLM 0.11 printed 90,048 tokens and 1.66x at 215,040 (issue 26646); 544 tokens is its 16-bit block."""
    answer = ask(QWEN3_NEXT, "0.11.0", kv_dtype="fp8", max_model_len=215_040)
    assert block_tokens(answer) == 1072
    found = with_blocks(answer, 339)
    assert (found.kv_tokens, round(found.max_concurrency, 2)) == (90_048, 1.66)
    assert block_tokens(ask(QWEN3_NEXT, "0.11.0")) == 544


def test_states_of_nemotron_take_the_format_of_the_config_from_0_11_1_on() -> None:
    """672 tokens in September 2025 (issue 24280); 8,320 for Nemotron-3-Super with fp8 in 2026 (issue 48401)."""
    assert block_tokens(ask(NEMOTRON_NANO_9B, "0.10.1")) == 672
    assert block_tokens(ask(NEMOTRON_NANO_9B, "0.12.0")) == 1312
    assert block_tokens(ask("nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-FP8", "0.23.1", kv_dtype="fp8")) == 8320


@pytest.mark.parametrize(("version", "all_layers"), [("0.13.0", 0), ("0.14.0", 1), ("0.15.2", 1), ("0.16.0", 0)])
def test_all_stages_are_set_against_one_in_0_14_and_0_15_only(version: str, all_layers: int) -> None:
    """#29431 brought it, #33698 mended it; an 0.15.2 log needs 24 GiB for 48 layers at 262,144 tokens (issue 34076)."""
    parallel = Parallelism(1, 2)
    answer = ask("Qwen/Qwen3-30B-A3B-FP8", version, parallel=parallel, kv_bytes=20 * GIB, max_model_len=262_144)
    assert held(answer).needed_bytes == (24 if all_layers else 12) * GIB
    assert held(answer).fits is not bool(all_layers)


@pytest.mark.parametrize(
    ("version", "windowed"),
    [("0.9.1", False), ("0.9.2", True), ("0.10.0", True), ("0.10.1", False), ("0.12.0", False), ("0.13.0", True)],
)
def test_llama4_chunks_were_capped_then_full_then_capped(version: str, windowed: bool) -> None:
    answer = ask("meta-llama/Llama-4-Scout-17B-16E-Instruct", version, parallel=Parallelism(8))
    assert answer.pool is not None
    assert (len(answer.pool.groups) > 1) is windowed


def test_windows_have_blocks_of_their_own_since_0_9_1() -> None:
    for version, groups in (("0.9.0", 1), ("0.9.1", 7), ("0.11", 7)):
        answer = ask("google/gemma-3-27b-it", version)
        assert answer.pool is not None and len(answer.pool.groups) == groups


def test_a_window_holds_the_tokens_of_two_steps_since_0_26() -> None:
    """With async scheduling a second step is under way (#47728)."""
    length, step = 131_072, 8192
    for version, in_flight in (("0.25.1", step), ("0.26.0", 2 * step)):
        answer = ask("google/gemma-3-27b-it", version, max_model_len=length, max_num_batched_tokens=step)
        assert answer.pool is not None
        window = -(-(1023 + in_flight) // 16) + 1
        assert answer.pool.blocks_per_request(length, answer.limits) == length // 16 + 6 * window


def test_the_fit_check_counted_layers_and_not_padded_groups_before_0_14() -> None:
    """Gemma 3 27B: 10 full and 52 windowed layers; since 0.14 its six groups of windows count as 60."""
    page = 16 * 2 * 16 * 128 * 2
    length, step = 8192, 2048
    window = -(-(1023 + step) // 16) + 1
    for version, windowed_layers in (("0.13.0", 52), ("0.14.0", 60)):
        answer = ask("google/gemma-3-27b-it", version, kv_bytes=GIB, max_model_len=length, max_num_batched_tokens=step)
        assert held(answer).needed_bytes == page * (10 * length // 16 + windowed_layers * window)
        assert held(answer).fits == (held(answer).needed_bytes <= GIB)


@pytest.mark.parametrize(
    ("model", "gpu", "block"),
    [
        ("deepseek-ai/DeepSeek-V2-Lite", None, 64),
        ("deepseek-ai/DeepSeek-V2-Lite", "h100", 64),
        ("deepseek-ai/DeepSeek-V2-Lite", "a100-80g", 16),
        ("deepseek-ai/DeepSeek-V2-Lite", "rtx-5090", 16),
        ("mistralai/Mistral-Small-4-119B-2603", "h100", 16),
        ("zai-org/GLM-5", "mi355x", 64),
        ("Qwen/Qwen3-8B", "h100", 16),
    ],
)
def test_latents_have_the_block_of_the_kernel_that_serves_them(model: str, gpu: str | None, block: int) -> None:
    for kv_dtype in ("auto", "fp8"):
        answer = ask(model, "0.20", hardware=find_hardware(gpu) if gpu else None, kv_dtype=kv_dtype, quantization="fp8")
        assert block_tokens(answer) == block


def test_blocks_that_hold_states_are_multiples_of_32_on_a_b200() -> None:
    for gpu, block in (("h200", 2096), ("b200", 2112), ("rtx-5090", 2096)):
        answer = ask("Qwen/Qwen3.5-35B-A3B", "0.24", kv_dtype="fp8", hardware=find_hardware(gpu))
        assert block_tokens(answer) == block


@pytest.mark.parametrize(
    ("version", "same_as", "words"),
    [
        ("9", "0.28", "newer than 0.28"),
        ("0.99", "0.28", "newer than 0.28"),
        ("0", "0.28", "names no release"),
        ("0.0.9", "0.1", "never released"),
    ],
)
def test_a_version_that_is_not_known_is_clamped_and_told(version: str, same_as: str, words: str) -> None:
    asked, known = (ask("google/gemma-3-27b-it", v, kv_bytes=8 * GIB) for v in (version, same_as))
    assert held(asked).max_concurrency == held(known).max_concurrency
    assert any(words in note for note in asked.notes)
    assert not any("rules of" in note for note in known.notes)


def test_no_version_means_what_logs_pin_and_says_so_where_it_matters() -> None:
    gemma, llama = ask("google/gemma-3-27b-it"), ask("meta-llama/Llama-3.1-8B")
    assert any("--engine vllm@0.28" in note for note in gemma.notes)
    assert not any("--engine" in note for note in llama.notes)


def test_glm_5_2_has_an_index_in_21_of_its_78_layers() -> None:
    """54,728 bytes per token were measured with the draft layer: 79 x 656 + 22 x 132."""
    answer = ask("zai-org/GLM-5.2-FP8", "0.24", kv_dtype="fp8", parallel=Parallelism(8))
    assert answer.bytes_per_token_per_gpu == 78 * 656 + 21 * 132 == 54_728 - 656 - 132


def test_auto_is_fp8_since_0_14_where_the_checkpoint_carries_scales() -> None:
    """#29980: the kv_cache_scheme of a ModelOpt checkpoint; an explicit format wins."""
    name = "nvidia/Gemma-4-31B-IT-NVFP4"
    old, new = ask(name, "0.13.0"), ask(name, "0.14.0")
    assert old.bytes_per_token == 2 * new.bytes_per_token
    assert ask(name, "0.14.0", kv_dtype="bfloat16").bytes_per_token == old.bytes_per_token
    assert any("auto is fp8 here" in note for note in new.notes)
    assert any("from 0.14 on" in note for note in old.notes)
    plain = "nvidia/Qwen3.6-35B-A3B-NVFP4"
    assert ask(plain, "0.13.0").bytes_per_token == ask(plain, "0.24").bytes_per_token


def test_a_vllm_on_a_cpu_has_blocks_of_128_tokens() -> None:
    """A scrape of one: 2 GiB of KV memory, 728 blocks, 93,184 tokens, 45.5 requests of 2,048 tokens."""
    answer = ask(
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        "0.28",
        hardware=find_hardware("cpu"),
        kv_bytes=2 * GIB,
        max_model_len=2048,
    )
    assert block_tokens(answer) == 128
    assert (held(answer).num_blocks, held(answer).kv_tokens, held(answer).max_concurrency) == (728, 93_184, 45.5)


def test_prefix_caching_of_mamba_2_kept_every_state_until_0_26() -> None:
    """#25752: a state of Granite's size wants 394 tokens; with the kernel's chunks of 256 a block has 512."""
    granite = {
        "model_type": "granitemoehybrid",
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "num_hidden_layers": 40,
        "layer_types": ["attention" if i in (5, 15, 25, 35) else "mamba" for i in range(40)],
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "hidden_size": 1536,
        "mamba_n_heads": 48,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "mamba_n_groups": 1,
        "mamba_chunk_size": 256,
        "torch_dtype": "bfloat16",
    }
    length = 131_072
    for version, caching, block, state_blocks in (
        ("0.12", None, 400, 1),
        ("0.12", True, 512, length // 512),
        ("0.27", True, 400, 2),
    ):
        answer = ask(granite, version, prefix_caching=caching, max_model_len=length)
        assert block_tokens(answer) == block
        assert answer.pool is not None
        groups = len(answer.pool.groups) - 1
        assert answer.pool.blocks_per_request(length, answer.limits) == -(-length // block) + groups * state_blocks


def test_linear_attention_had_no_prefix_caching_before_0_15() -> None:
    for version, blocks in (("0.14", 1), ("0.15", 2)):
        answer = ask(QWEN3_NEXT, version, prefix_caching=True, max_model_len=54_400)
        assert answer.pool is not None
        assert answer.pool.blocks_per_request(54_400, answer.limits) == 100 + 3 * blocks
