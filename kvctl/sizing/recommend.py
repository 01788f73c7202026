"""Choosing: other GPUs, KV formats and parallel sizes for the same question, and the cheapest that fits.

Knows how to change a question and what a setup costs by the hour; computes nothing itself. Floor 1.
"""

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from kvctl.errors import KvctlError
from kvctl.model.hardware import HardwareProfile
from kvctl.model.weight_size import Parallelism
from kvctl.sizing.request import SizeAnswer, SizeRequest, size_up
from kvctl.sizing.users import UsersFit, users_fit

TENSOR_SIZES = (1, 2, 4, 8)
KVCTL_KV_DTYPES = ("auto", "bfloat16", "float16", "bf16", "fp16", "fp8", "fp8_e4m3", "fp8_e5m2")
KVCTL_ARCHITECTURES = (  # those of config.json, then those of .gguf files; a test holds them to the engine's
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Gemma3ForCausalLM",
    "Gemma3ForConditionalGeneration",
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma3",
)
FP8_ARCHES = ("hopper", "ada", "blackwell", "cdna3", "cdna4", "gaudi")


@dataclass(frozen=True, slots=True)
class Demand:
    """What must fit: users at once, the context of each, tokens in common."""

    users: int = 1
    context_tokens: int | None = None  # None: the request's own max_model_len
    shared_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Choice:
    """One setup and whether it meets the demand. `problem`: why it could not be answered."""

    label: str
    request: SizeRequest
    answer: SizeAnswer | None
    users: UsersFit | None
    usd_per_hour: float | None
    problem: str | None = None

    @property
    def fits(self) -> bool:
        """Whether the demand is met."""
        return self.users is not None and self.users.fits and self.answer is not None and bool(self.answer.fits)


def price(hardware: HardwareProfile, gpus: int) -> float | None:
    """Middle of the rent range of so many devices; None where the profile has none."""
    if hardware.usd_per_hour is None:
        return None
    return sum(hardware.usd_per_hour) / 2 * gpus


def choose(request: SizeRequest, demand: Demand, label: str) -> Choice:
    """Answer one setup; a setup that is impossible tells why instead of failing."""
    context = demand.context_tokens or request.max_model_len
    hardware = request.hardware
    cost = price(hardware, request.parallel.gpus * request.parallel.data) if hardware else None
    try:
        request, answer = seat(request if context is None else replace(request, max_model_len=context), demand)
    except KvctlError as error:
        return Choice(label, request, None, None, cost, error.message)
    fit = users_fit(answer, demand.users, context or answer.limits.max_model_len, demand.shared_tokens)
    return Choice(label, request, answer, fit, cost)


def seat(request: SizeRequest, demand: Demand) -> tuple[SizeRequest, SizeAnswer]:
    """Answer with enough seats (max_num_seqs) for the users, unless the user has said how many there are.

    Raises:
        KvctlError: as `size_up`.
    """
    answer = size_up(request)
    if request.max_num_seqs is None and answer.limits.max_num_seqs < demand.users:
        request = replace(request, max_num_seqs=demand.users)
        answer = size_up(request)
    return request, answer


def compare(
    request: SizeRequest, demand: Demand, gpus: Sequence[HardwareProfile], kv_dtypes: Sequence[str]
) -> list[Choice]:
    """The same question on several GPUs and KV formats, in the order given."""
    machines: Sequence[HardwareProfile | None] = gpus or [request.hardware]
    formats = kv_dtypes or [request.kv_dtype]
    choices = []
    for machine in machines:
        for name in formats:
            label = " ".join(part for part in (machine.id if machine else "", name if kv_dtypes else "") if part)
            total = request.total_bytes if machine is request.hardware else None
            asked = replace(request, hardware=machine, kv_dtype=name, total_bytes=total)
            choices.append(choose(asked, demand, label))
    return choices


def _can_fp8(hardware: HardwareProfile) -> bool:
    return hardware.arch.startswith(FP8_ARCHES)


def recommend(request: SizeRequest, demand: Demand, machines: Iterable[HardwareProfile]) -> Choice | None:
    """The cheapest setup that fits: fewest dollars, then fewest GPUs, then the least change of KV format.

    Where no machine has a price, memory in all stands for the cost. None: nothing fits.
    """
    fitting: list[tuple[tuple[float, int, int], Choice]] = []
    for machine in machines:
        for tensor in TENSOR_SIZES:
            found = _smallest_change(request, demand, machine, tensor)
            if found is not None:
                cost = found[0].usd_per_hour
                gigabytes = machine.memory_gb * tensor
                rank = (cost if cost is not None else 1000.0 + gigabytes, tensor, found[1])
                fitting.append((rank, found[0]))
                break  # more ranks of the same machine cost more
    return min(fitting, key=lambda item: item[0])[1] if fitting else None


def _smallest_change(
    request: SizeRequest, demand: Demand, machine: HardwareProfile, tensor: int
) -> tuple[Choice, int] | None:
    formats = ["auto", "fp8"] if request.kv_dtype == "auto" and _can_fp8(machine) else [request.kv_dtype]
    for change, name in enumerate(formats):
        parallel = Parallelism(tensor, request.parallel.pipeline, request.parallel.data, request.parallel.expert)
        asked = replace(request, hardware=machine, parallel=parallel, kv_dtype=name, total_bytes=None)
        choice = choose(asked, demand, machine.id)
        if choice.fits:
            return choice, change
    return None


def obstacle(choice: Choice, program: str) -> str | None:
    """Why a program cannot run a choice; None if it can. `kvctl serve` runs some families, unquantized, on one GPU."""
    request, answer = choice.request, choice.answer
    if not program.startswith("kvctl"):
        return None
    architecture = request.model.shape.architecture
    if architecture not in KVCTL_ARCHITECTURES:
        return f"it does not serve {architecture}"
    if request.hardware is not None and request.hardware.vendor not in ("nvidia", "cpu"):
        return "it runs on NVIDIA GPUs and CPUs"
    if request.parallel.gpus * request.parallel.data > 1:
        return "it runs on one GPU"
    if request.kv_dtype not in KVCTL_KV_DTYPES:
        return f"it has no {request.kv_dtype} KV cache"
    weights = answer.weights if answer is not None else None
    is_quantized = weights is not None and weights.format_name not in ("bfloat16", "float16", "float32")
    return "it has no quantized weights" if is_quantized or request.quantization is not None else None


def serve_command(choice: Choice, program: str) -> str:
    """The flags of a choice, ready to paste for `kvctl serve` or `vllm serve`."""
    request, answer = choice.request, choice.answer
    words = [*program.split(), request.model.given or request.model.id]
    if answer is not None:
        words += ["--max-model-len", str(answer.limits.max_model_len)]
    if choice.users is not None:
        words += [
            "--max-num-seqs",
            str(max(1, min(choice.users.max_users, answer.limits.max_num_seqs if answer else 1))),
        ]
    if request.max_num_batched_tokens is not None:
        words += ["--max-num-batched-tokens", str(request.max_num_batched_tokens)]
    if request.parallel.tensor > 1:
        words += ["--tensor-parallel-size", str(request.parallel.tensor)]
    if request.parallel.pipeline > 1:
        words += ["--pipeline-parallel-size", str(request.parallel.pipeline)]
    plain = {"bf16": "bfloat16", "fp16": "float16"}.get(request.kv_dtype, request.kv_dtype)
    if plain not in ("auto", answer.dtype if answer is not None else "auto"):
        words += ["--kv-cache-dtype", plain]
    if request.quantization is not None:
        words += ["--quantization", request.quantization]
    if answer is not None and answer.budget is not None and request.kv_bytes is None:
        used = request.utilization or answer.defaults.utilization
        words += ["--gpu-memory-utilization", f"{used:g}"]
    return shlex.join(words)
