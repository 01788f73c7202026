"""`kvctl size`: what fits, how many at once and how fast, for any config.json. Options -> question -> page or JSON.

Knows options and exit codes; the arithmetic is in sizing/, the page in size_page.py. Imports nothing heavy until the
command runs. Floor 4.
"""

from enum import StrEnum
from typing import Annotated

import typer

from kvctl.cli.help_page import HelpPageCommand

MODEL, MACHINE, ENGINE, QUESTION, OUTPUT = "Model", "Machine", "Engine", "Question", "Output"
EXIT_INTERRUPTED = 130


class KVDtypeName(StrEnum):
    """How keys and values are stored."""

    AUTO = "auto"
    BF16 = "bf16"
    BFLOAT16 = "bfloat16"
    FP16 = "fp16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"
    FP8 = "fp8"
    FP8_E4M3 = "fp8_e4m3"
    FP8_E5M2 = "fp8_e5m2"
    INT8 = "int8"
    NVFP4 = "nvfp4"


class WeightDtypeName(StrEnum):
    """What weights and activations are computed in."""

    AUTO = "auto"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"
    HALF = "half"


Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="Hub id, folder, config.json, .gguf file, or - for a config on stdin.")
]
Refresh = Annotated[bool, typer.Option("--refresh", help="Ask the hub before the cache.", rich_help_panel=MODEL)]
Dtype = Annotated[
    WeightDtypeName,
    typer.Option("--dtype", metavar="DTYPE", help="auto, bfloat16, float16, float32.", rich_help_panel=MODEL),
]
Quantization = Annotated[
    str | None,
    typer.Option(
        "--quantization",
        "-q",
        metavar="FORMAT",
        help="fp8, awq, gptq, nvfp4, mxfp4, Q4_K_M, ...",
        rich_help_panel=MODEL,
    ),
]
Gpu = Annotated[
    str | None,
    typer.Option("--gpu", metavar="NAME", help="Profile, or auto for this machine's GPU.", rich_help_panel=MACHINE),
]
GpuCount = Annotated[
    int | None,
    typer.Option("--gpu-count", metavar="N", help="GPUs; sets --tp where it is not given.", rich_help_panel=MACHINE),
]
Utilization = Annotated[
    float | None,
    typer.Option("--gpu-memory-utilization", metavar="SHARE", help="Share of the GPU.", rich_help_panel=MACHINE),
]
KVBytes = Annotated[
    str | None,
    typer.Option("--kv-cache-memory-bytes", metavar="SIZE", help="KV memory, like 12.3GiB.", rich_help_panel=MACHINE),
]
Calibrate = Annotated[
    str | None,
    typer.Option(
        "--calibrate", metavar="FILE|URL", help="Learn from a start-up log or /metrics.", rich_help_panel=MACHINE
    ),
]
Uncalibrated = Annotated[
    bool, typer.Option("--uncalibrated", help="Leave stored calibrations aside.", rich_help_panel=MACHINE)
]
Engine = Annotated[
    str,
    typer.Option(
        "--engine",
        metavar="NAME",
        help="kvctl, vllm (or vllm@0.10.2), sglang, llama.cpp, trtllm, ideal.",
        rich_help_panel=ENGINE,
    ),
]
Tensor = Annotated[
    int | None,
    typer.Option(
        "--tensor-parallel-size", "--tp", metavar="N", help="Ranks of a replica; --tp.", rich_help_panel=ENGINE
    ),
]
Pipeline = Annotated[
    int,
    typer.Option(
        "--pipeline-parallel-size", "--pp", metavar="N", help="Stages of a replica; --pp.", rich_help_panel=ENGINE
    ),
]
Data = Annotated[
    int, typer.Option("--data-parallel-size", "--dp", metavar="N", help="Replicas; --dp.", rich_help_panel=ENGINE)
]
Expert = Annotated[
    bool, typer.Option("--enable-expert-parallel", help="Split experts by expert.", rich_help_panel=ENGINE)
]
ContextParallel = Annotated[
    int,
    typer.Option(
        "--decode-context-parallel-size",
        "--dcp",
        metavar="N",
        help="Ranks that share a context; --dcp.",
        rich_help_panel=ENGINE,
    ),
]
KVDtype = Annotated[
    KVDtypeName,
    typer.Option(
        "--kv-cache-dtype",
        metavar="DTYPE",
        help="auto, bf16, fp16, fp8, fp8_e4m3, fp8_e5m2, int8, nvfp4.",
        rich_help_panel=ENGINE,
    ),
]
BlockSize = Annotated[
    int | None, typer.Option("--block-size", metavar="TOKENS", help="Tokens a block.", rich_help_panel=ENGINE)
]
MaxLen = Annotated[
    str | None,
    typer.Option("--max-model-len", metavar="TOKENS", help="Longest request, like 32k; auto.", rich_help_panel=ENGINE),
]
MaxSeqs = Annotated[
    int | None, typer.Option("--max-num-seqs", metavar="REQUESTS", help="Requests at once.", rich_help_panel=ENGINE)
]
MaxTokens = Annotated[
    str | None,
    typer.Option("--max-num-batched-tokens", metavar="TOKENS", help="Tokens a step.", rich_help_panel=ENGINE),
]
Caching = Annotated[
    bool | None,
    typer.Option("--enable-prefix-caching/--no-enable-prefix-caching", help="Prefix cache.", rich_help_panel=ENGINE),
]
Eager = Annotated[bool, typer.Option("--enforce-eager", help="No CUDA graphs.", rich_help_panel=ENGINE)]
PrefixShare = Annotated[
    float,
    typer.Option(
        "--prefix-share",
        metavar="SHARE",
        help="Share of each context that all have in common.",
        rich_help_panel=QUESTION,
    ),
]
Users = Annotated[
    int | None, typer.Option("--users", metavar="N", help="Requests at once that must fit.", rich_help_panel=QUESTION)
]
Context = Annotated[
    str | None, typer.Option("--context", metavar="TOKENS", help="Prompt tokens of each.", rich_help_panel=QUESTION)
]
Output = Annotated[
    str | None, typer.Option("--output", metavar="TOKENS", help="Output tokens of each.", rich_help_panel=QUESTION)
]
Workload = Annotated[
    str | None,
    typer.Option("--workload", metavar="NAME", help="Lengths from a profile, like chat.", rich_help_panel=QUESTION),
]
MaxContext = Annotated[
    bool, typer.Option("--max-context", help="Print the longest context that fits.", rich_help_panel=QUESTION)
]
Compare = Annotated[
    str | None, typer.Option("--compare", metavar="GPU,GPU", help="The same on several GPUs.", rich_help_panel=QUESTION)
]
CompareKV = Annotated[
    str | None,
    typer.Option(
        "--compare-kv", metavar="DTYPE,DTYPE", help="The same in several KV formats.", rich_help_panel=QUESTION
    ),
]
Recommend = Annotated[
    bool, typer.Option("--recommend", help="Find the cheapest setup that fits.", rich_help_panel=QUESTION)
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.", rich_help_panel=OUTPUT)]
Explain = Annotated[
    bool, typer.Option("--explain", help="Show every formula with its numbers.", rich_help_panel=OUTPUT)
]
Ascii = Annotated[bool, typer.Option("--ascii", help="Draw with ASCII only.", rich_help_panel=OUTPUT)]
Svg = Annotated[
    str | None, typer.Option("--svg", metavar="FILE", help="Save the page as a picture.", rich_help_panel=OUTPUT)
]


def size(
    model: Model,
    refresh: Refresh = False,
    dtype: Dtype = WeightDtypeName.AUTO,
    quantization: Quantization = None,
    gpu: Gpu = None,
    gpu_count: GpuCount = None,
    gpu_memory_utilization: Utilization = None,
    kv_cache_memory_bytes: KVBytes = None,
    calibrate: Calibrate = None,
    uncalibrated: Uncalibrated = False,
    engine: Engine = "kvctl",
    tensor_parallel_size: Tensor = None,
    pipeline_parallel_size: Pipeline = 1,
    data_parallel_size: Data = 1,
    enable_expert_parallel: Expert = False,
    decode_context_parallel_size: ContextParallel = 1,
    kv_cache_dtype: KVDtype = KVDtypeName.AUTO,
    block_size: BlockSize = None,
    max_model_len: MaxLen = None,
    max_num_seqs: MaxSeqs = None,
    max_num_batched_tokens: MaxTokens = None,
    enable_prefix_caching: Caching = None,
    enforce_eager: Eager = False,
    prefix_share: PrefixShare = 0.0,
    users: Users = None,
    context: Context = None,
    output: Output = None,
    workload: Workload = None,
    max_context: MaxContext = False,
    compare: Compare = None,
    compare_kv: CompareKV = None,
    recommend: Recommend = False,
    as_json: AsJson = False,
    explain: Explain = False,
    ascii_only: Ascii = False,
    svg: Svg = None,
) -> None:
    """Say what fits, how many at once and how fast, from a config.json.

    Without --gpu or --kv-cache-memory-bytes: bytes per token and weights only.
    Exit codes: 0 fits, 1 error, 2 usage, 3 cannot tell, 4 does not fit.
    """
    from kvctl.cli.size_run import SizeOptions, run

    options = SizeOptions(
        model=model,
        refresh=refresh,
        dtype=str(dtype),
        quantization=quantization,
        gpu=gpu,
        gpu_count=gpu_count,
        utilization=gpu_memory_utilization,
        kv_bytes=kv_cache_memory_bytes,
        calibrate=calibrate,
        uncalibrated=uncalibrated,
        engine=engine,
        tensor=tensor_parallel_size,
        pipeline=pipeline_parallel_size,
        data=data_parallel_size,
        expert=enable_expert_parallel,
        context_parallel=decode_context_parallel_size,
        kv_dtype=str(kv_cache_dtype),
        block_size=block_size,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        prefix_caching=enable_prefix_caching,
        eager=enforce_eager,
        prefix_share=prefix_share,
        users=users,
        context=context,
        output=output,
        workload=workload,
        max_context=max_context,
        compare=compare,
        compare_kv=compare_kv,
        recommend=recommend,
        as_json=as_json,
        explain=explain,
        ascii_only=ascii_only,
        svg=svg,
    )
    try:
        code = run(options)
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None
    if code:
        raise typer.Exit(code)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("size", cls=HelpPageCommand)(size)
