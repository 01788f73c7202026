"""`kvctl serve`: flags to `ServeConfig`, then `launch`. Imports no torch and no web stack until it runs. Floor 4."""

import json
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import typer

from kvctl.cli import options as o
from kvctl.cli.vllm_flags import ServeCommand
from kvctl.errors import ConfigError

if TYPE_CHECKING:
    from kvctl.server.config import ModelOptions, NetworkOptions, SchedulerOptions, ServeConfig
    from kvctl.server.options import ApiOptions

EXIT_INTERRUPTED = 130
_DTYPES = {"half": "float16", "float": "float32"}
_LOAD_FORMATS = {"safetensors": "auto"}


def serve(
    context: typer.Context,
    model: o.ModelName = None,
    config: o.ConfigFile = None,
    revision: o.Revision = None,
    served_model_name: o.ServedModelName = None,
    dtype: o.Dtype = o.DtypeName.AUTO,
    load_format: o.LoadFormat = o.LoadFormatName.AUTO,
    seed: o.Seed = 0,
    max_model_len: o.MaxModelLen = None,
    chat_template: o.ChatTemplate = None,
    generation_config: o.GenerationConfig = "auto",
    override_generation_config: o.OverrideGenerationConfig = None,
    max_logprobs: o.MaxLogprobs = 20,
    kv_cache_memory_bytes: o.KVCacheMemoryBytes = None,
    num_gpu_blocks_override: o.NumGpuBlocksOverride = None,
    gpu_memory_utilization: o.GpuMemoryUtilization = 0.92,
    kv_cache_dtype: o.KVCacheDtype = o.KVCacheDtypeName.AUTO,
    block_size: o.BlockSize = 16,
    enable_prefix_caching: o.EnablePrefixCaching = True,
    prefix_caching_hash_algo: o.PrefixCachingHashAlgo = o.HashName.SHA256,
    max_num_seqs: o.MaxNumSeqs = None,
    max_num_batched_tokens: o.MaxNumBatchedTokens = None,
    scheduling_policy: o.SchedulingPolicy = o.PolicyName.FCFS,
    enable_chunked_prefill: o.EnableChunkedPrefill = True,
    long_prefill_token_threshold: o.LongPrefillTokenThreshold = 0,
    scheduler_reserve_full_isl: o.SchedulerReserveFullIsl = True,
    watermark: o.Watermark = 0.0,
    performance_mode: o.PerformanceMode = o.ModeName.BALANCED,
    async_scheduling: o.AsyncScheduling = True,
    host: o.Host = "127.0.0.1",
    port: o.Port = 8000,
    uds: o.Uds = None,
    root_path: o.RootPath = "",
    api_key: o.ApiKey = None,
    allowed_origins: o.AllowedOrigins = None,
    ssl_keyfile: o.SslKeyfile = None,
    ssl_certfile: o.SslCertfile = None,
    ssl_ca_certs: o.SslCaCerts = None,
    ssl_cert_reqs: o.SslCertReqs = 0,
    max_num_queued_reqs: o.MaxNumQueuedReqs = None,
    max_body_size: o.MaxBodySize = None,
    response_role: o.ResponseRole = "assistant",
    trust_request_chat_template: o.TrustRequestChatTemplate = False,
    default_chat_template_kwargs: o.DefaultChatTemplateKwargs = None,
    return_tokens_as_token_ids: o.ReturnTokensAsTokenIds = False,
    enable_force_include_usage: o.EnableForceIncludeUsage = False,
    enable_request_id_headers: o.EnableRequestIdHeaders = False,
    shutdown_timeout: o.ShutdownTimeout = 0.0,
    engine_stall_timeout: o.EngineStallTimeout = 60.0,
    device: o.Device = o.DeviceName.AUTO,
    threads: o.Threads = None,
    cpu_kernels: o.CpuKernels = o.CpuKernelsName.AUTO,
    enforce_eager: o.EnforceEager = False,
    log_level: o.LogLevel = o.LogLevelName.INFO,
    uvicorn_log_level: o.UvicornLogLevel = o.ServerLogLevelName.INFO,
    disable_uvicorn_access_log: o.DisableUvicornAccessLog = False,
    disable_access_log_for_endpoints: o.DisableAccessLogForEndpoints = None,
    disable_log_stats: o.DisableLogStats = False,
    enable_log_requests: o.EnableLogRequests = False,
) -> None:
    """Serve a model through the paged KV engine behind an OpenAI-compatible API."""
    serve_config = build_config(context.params)
    from kvctl.server.launch import launch

    try:
        launch(serve_config)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)


def build_config(values: dict[str, Any]) -> "ServeConfig":
    """Build the configuration from the command's values, by option name.

    Raises:
        ConfigError: an impossible value or combination.
    """
    from kvctl.core.config import CacheConfig
    from kvctl.engine.config import DeviceConfig
    from kvctl.server.config import ServeConfig

    return ServeConfig(
        model=_model_options(values),
        scheduler=_scheduler_options(values),
        cache=CacheConfig(
            values["block_size"], values["enable_prefix_caching"], values["prefix_caching_hash_algo"].value
        ),
        device=DeviceConfig(
            device=values["device"].value,
            num_threads=values["threads"],
            cpu_kernels=values["cpu_kernels"].value,
            gpu_memory_utilization=values["gpu_memory_utilization"],
            kv_cache_memory_bytes=values["kv_cache_memory_bytes"],
            kv_cache_dtype=values["kv_cache_dtype"].value,
            num_gpu_blocks_override=values["num_gpu_blocks_override"],
            enforce_eager=values["enforce_eager"],
        ),
        network=_network_options(values),
        api=_api_options(values),
        max_num_queued_reqs=values["max_num_queued_reqs"],
        shutdown_timeout_s=values["shutdown_timeout"],
        stall_timeout_s=values["engine_stall_timeout"] or None,
        log_level=values["log_level"].value,
        log_stats=not values["disable_log_stats"],
    )


def _model_options(values: dict[str, Any]) -> "ModelOptions":
    from kvctl.server.config import ModelOptions

    dtype, load_format = values["dtype"].value, values["load_format"].value
    max_logprobs = values["max_logprobs"]
    if max_logprobs < -1:
        raise ConfigError(f"--max-logprobs is {max_logprobs}", hint="Give -1 (no limit), 0 or more.")
    return ModelOptions(
        name=values["model"],
        revision=values["revision"],
        served_names=tuple(values["served_model_name"] or ()),
        dtype=_DTYPES.get(dtype, dtype),
        load_format=_LOAD_FORMATS.get(load_format, load_format),
        seed=values["seed"],
        max_model_len=values["max_model_len"],
        chat_template=values["chat_template"],
        generation_config=values["generation_config"],
        override_generation_config=values["override_generation_config"] or {},
        max_logprobs=max_logprobs,
    )


def _scheduler_options(values: dict[str, Any]) -> "SchedulerOptions":
    from kvctl.server.config import SchedulerOptions

    return SchedulerOptions(
        max_num_seqs=values["max_num_seqs"],
        max_num_batched_tokens=values["max_num_batched_tokens"],
        policy=values["scheduling_policy"].value,
        enable_chunked_prefill=values["enable_chunked_prefill"],
        long_prefill_token_threshold=values["long_prefill_token_threshold"],
        reserve_full_isl=values["scheduler_reserve_full_isl"],
        watermark=values["watermark"],
        performance_mode=values["performance_mode"].value,
        async_scheduling=values["async_scheduling"],
    )


def _network_options(values: dict[str, Any]) -> "NetworkOptions":
    from kvctl.server.config import POLLED_PATHS, NetworkOptions

    more_quiet = tuple(path.strip() for path in (values["disable_access_log_for_endpoints"] or "").split(",") if path)
    names = ("host", "port", "uds", "ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "ssl_cert_reqs")
    return NetworkOptions(
        **{name: values[name] for name in names},
        log_level=values["uvicorn_log_level"].value,
        access_log=not values["disable_uvicorn_access_log"],
        quiet_paths=POLLED_PATHS + more_quiet,
    )


def _api_options(values: dict[str, Any]) -> "ApiOptions":
    from kvctl.server.options import ApiOptions

    return ApiOptions(
        api_keys=tuple(key for key in values["api_key"] or () if key),
        allowed_origins=tuple(_origins(values["allowed_origins"] or ())),
        root_path=values["root_path"].rstrip("/"),
        response_role=values["response_role"],
        trust_request_chat_template=values["trust_request_chat_template"],
        default_chat_template_kwargs=values["default_chat_template_kwargs"] or {},
        force_include_usage=values["enable_force_include_usage"],
        request_id_headers=values["enable_request_id_headers"],
        log_requests=values["enable_log_requests"],
        return_tokens_as_token_ids=values["return_tokens_as_token_ids"],
        max_body_bytes=values["max_body_size"] or ApiOptions().max_body_bytes,
    )


def _origins(words: Sequence[str]) -> Iterator[str]:
    """One origin per word, or vLLM's way: a JSON list of them."""
    for word in words:
        if not word.startswith("["):
            yield word
            continue
        try:
            origins = json.loads(word)
        except ValueError:
            origins = None
        if not isinstance(origins, list) or not all(isinstance(origin, str) for origin in origins):
            raise ConfigError(f"--allowed-origins {word} is no JSON list of texts", hint="Give one origin per flag.")
        yield from origins


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("serve", cls=ServeCommand, no_args_is_help=False)(serve)
