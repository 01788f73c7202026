"""The names of model families: which `model_type` or class stands for which rule. Data only, no rules.

A family that is in none of these tables is not known here, and nothing is guessed about it. Floor 0.
"""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Decoders whose layers are all alike: full attention, or a window on every layer when the config sets one.
PLAIN = _words(
    """
    apertus aquila arcee arctic aria_text aya_vision baichuan bitnet bloom chameleon chatglm codegen codeshell
    cohere cpmant cwm dbrx deepseek deepseek_llm diffllama dots1 emu3 ernie4_5 ernie4_5_moe ernie4_5_moe_vl_text
    ernie4_5_vl_moe_text exaone falcon flex_olmo fuyu gemma glm glm4 glm46v_text glm4_moe glm4v_moe_text glm4v_text
    glm_ocr_text gpt2 gpt_bigcode gpt_neox gpt_neox_japanese gptj granite granitemoe granitemoeshared grok grok-1
    helium hunyuan_v1_dense hunyuan_v1_moe idefics2 internlm internlm2 internlm3 internvl_chat iquestcoder jais
    jais2 llama mellum mimo minicpm minimax_m2 ministral ministral3 mistral mixtral moondream mpt nanochat nemotron
    olmo olmo2 olmoe openai-gpt opt orion ouro persimmon phi phi3 phi4_multimodal phi4mm phimoe plamo qwen qwen2
    qwen2_5_omni_text qwen2_5_vl qwen2_5_vl_text qwen2_audio qwen2_moe qwen2_vl qwen2_vl_text qwen3 qwen3_asr_text
    qwen3_moe qwen3_omni_moe_text qwen3_vl qwen3_vl_moe qwen3_vl_moe_text qwen3_vl_text refinedweb refinedwebmodel
    sarvam_moe seed_oss skywork smollm3 solar solar_open stablelm stablelm_epoch starcoder2 tele_chat telechat
    vaultgemma xglm xverse yi
    """
)
# Families whose every layer keeps a latent (MLA).
LATENT = _words(
    """
    deepseek_v2 deepseek_v3 deepseek_v32 deepseek_vl_v2 glm4_moe_lite glm_moe_dsa kimi_k2 kimi_k25 kimi_vl
    minicpm3 mistral4 mistral_large4 pangu_ultra_moe sarvam_mla axk1 axk2 youtu
    """
)
# The windowed layers of families that name one window for all layers (config key sliding_window).
WINDOW_ON_ALL = frozenset({"mistral", "mixtral", "ministral", "phi3", "phimoe", "starcoder2"})
# Checkpoints that name a class but no model type, or a type of a loader of their own.
BY_ARCHITECTURE: dict[str, str] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Glm4MoeForCausalLM": "glm4_moe",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "DeepseekV32ForCausalLM": "deepseek_v32",
    "DeepseekV4ForCausalLM": "deepseek_v4",
    "GlmMoeDsaForCausalLM": "glm_moe_dsa",
    "KimiLinearForCausalLM": "kimi_linear",
    "MiniMaxM2ForCausalLM": "minimax_m2",
    "MiniMaxM3SparseForCausalLM": "minimax_m3",
    "MiniMaxM3ForCausalLM": "minimax_m3",
    "MiniMaxM1ForCausalLM": "minimax",
    "MiniMaxText01ForCausalLM": "minimax",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3_text",
    "GptOssForCausalLM": "gpt_oss",
    "NemotronHForCausalLM": "nemotron_h",
    "DeciLMForCausalLM": "nemotron-nas",
    "OPTForCausalLM": "opt",
    "GPT2LMHeadModel": "gpt2",
    "FalconForCausalLM": "falcon",
    "ChatGLMModel": "chatglm",
    "ChatGLMForConditionalGeneration": "chatglm",
    "WhisperForConditionalGeneration": "whisper",
}
# Fields that change what a layer keeps: a config without a known name that sets one of them is not plain.
TELLING = (
    "kv_lora_rank",
    "sliding_window",
    "attention_chunk_size",
    "layer_types",
    "layers_block_type",
    "hybrid_override_pattern",
    "linear_attn_config",
    "ssm_state_size",
    "mamba_d_state",
    "compress_ratios",
    "index_topk",
    "num_kv_shared_layers",
    "attn_type_list",
    "full_attention_interval",
    "is_encoder_decoder",
    "cla_share_factor",
    "use_cla",
)
