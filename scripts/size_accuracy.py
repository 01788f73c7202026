"""Print how well `kvctl size` agrees with numbers that real servers printed.

Three tables: bytes per token and block counts from a given KV memory (exact rules), KV memory predicted from a GPU
profile alone, and the same after calibrating on another log of the same machine. Every case that is off is named.

    python scripts/size_accuracy.py [--logs FILE] [--markdown]
"""

import argparse
import re
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from kvctl.errors import KvctlError
from kvctl.model.hardware import HardwareProfile, find_hardware
from kvctl.model.weight_size import Parallelism
from kvctl.sizing.calibration import calibrate
from kvctl.sizing.memory import Overheads
from kvctl.sizing.request import SizeAnswer, SizeRequest, size_up
from kvctl.sizing.server_log import ServerLog
from kvctl.sizing.sized_model import load_model
from kvctl.units import GIB

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "tests" / "data" / "sizing"
ENGINES = {
    "vllm": "vllm",
    "vllm-ascend": "vllm",
    "sglang": "sglang",
    "llama.cpp": "llama.cpp",
    "tensorrt-llm": "trtllm",
}
KV_DTYPES = {"fp16": "float16", "f16": "float16", "fp8_ds_mla": "fp8"}
PRINTED_GIB = 0.005  # a figure of two decimals is this uncertain either way
SWAP_GIB = 4  # vLLM V0's default swap space
# Why a case may be off, by its name. Each is a fact about the run or a limit of its log, not of the rule.
EXPLAINED = {
    "glm51-rocm-err": "72.0 kB a token on ROCm: nothing whole for 78 layers, 912 B for 79; no known layout has that",
}
# Cases whose log leaves out what the answer hangs on, and what would make it exact.
NOT_ASKED = {
    "dsv4-flash-1m": "the log leaves out version, batch and draft layers; vLLM 0.26, 8,192 and 46 windows are exact",
}


@dataclass(frozen=True)
class Check:
    """One printed number against ours."""

    case: str
    what: str
    observed: float
    low: float
    high: float

    @property
    def holds(self) -> bool:
        """Whether the printed number lies in ours."""
        return self.low <= self.observed <= self.high


@dataclass(frozen=True)
class MemoryCheck:
    """KV memory from a profile: predicted range against printed."""

    case: str
    gpu: str
    observed_gib: float
    low_gib: float
    value_gib: float
    high_gib: float

    @property
    def error(self) -> float:
        """Relative error of the predicted value."""
        return (self.value_gib - self.observed_gib) / self.observed_gib

    @property
    def is_covered(self) -> bool:
        """Whether the printed number lies in the predicted range."""
        return self.low_gib - PRINTED_GIB <= self.observed_gib <= self.high_gib + PRINTED_GIB


class Cases:
    """The logs, and what case_models.yaml adds."""

    def __init__(self, logs: Path, extra: Path) -> None:
        self.cases: list[dict[str, Any]] = yaml.safe_load(logs.read_text(encoding="utf-8"))["cases"]
        self.extra: dict[str, Any] = yaml.safe_load(extra.read_text(encoding="utf-8"))
        self._models: dict[str, Any] = {}

    def model_name(self, case: dict[str, Any]) -> str | None:
        """The catalogue entry of a case's model."""
        named: str | None = self.extra["models"].get(case["id"])
        if named is None and case.get("config"):
            named = str(case["config"]).removesuffix(".json").replace("__", "/", 1)
        return named

    def gpu(self, case: dict[str, Any]) -> HardwareProfile | None:
        """The profile of a case's GPU; None for a class of GPUs."""
        named = self.extra["gpu_overrides"].get(case["id"]) or self.extra["gpus"].get(case["inputs"].get("gpu"))
        return find_hardware(named) if named else None

    def request(self, case: dict[str, Any]) -> SizeRequest | None:
        """The question that a user would have asked about this run; None: no config is known."""
        name = self.model_name(case)
        if name is None:
            return None
        if name not in self._models:
            self._models[name] = load_model(name)
        inputs = case["inputs"]
        flags = inputs.get("flags") or ""
        kv_dtype = inputs.get("kv_dtype", "auto")
        return SizeRequest(
            model=self._models[name],
            engine=engine_of(case),
            parallel=Parallelism(
                inputs.get("tensor_parallel", 1),
                inputs.get("pipeline_parallel", 1),
                8 if "DP8" in flags else 1,
                "expert parallel" in flags,
            ),
            utilization=inputs.get("gpu_memory_utilization"),
            kv_dtype=KV_DTYPES.get(kv_dtype, kv_dtype),
            quantization=self.extra["quantization"].get(case["id"]),
            block_size=printed_block(case),
            max_model_len=inputs.get("max_model_len"),
            max_num_seqs=flag(flags, "max_num_seqs"),
            max_num_batched_tokens=flag(flags, "max_num_batched_tokens"),
            prefix_caching=True if "prefix caching" in flags else None,
            enforce_eager="enforce_eager" in flags,
            context_parallel=flag(flags, "decode_context_parallel") or 1,
        )


def flag(flags: str, name: str) -> int | None:
    match = re.search(rf"{name} (\d+)", flags)
    return int(match[1]) if match else None


def engine_of(case: dict[str, Any]) -> str:
    """vllm@VERSION; a development build without a version counts as the newest, '0.8 V0' as the last V0."""
    engine = ENGINES[case["engine"]]
    version = str(case.get("version", ""))
    if engine != "vllm" or "dev2" in version or not re.match(r"\d", version):
        return engine
    number = re.match(r"\d+(\.\d+){0,2}", version)
    assert number is not None
    return "vllm@0.7.9" if "V0" in version and number[0] in ("0.8", "0.9") else f"vllm@{number[0]}"


def printed_block(case: dict[str, Any]) -> int | None:
    """The block size where the run chose one itself; hybrids' inflated blocks are ours to find."""
    size = case["inputs"].get("block_size")
    is_inflated = case["kind"] in ("gdn-hybrid", "mamba-hybrid")
    return None if size in (None, 16) or is_inflated else size


def rule_checks(cases: Cases) -> tuple[list[Check], dict[str, str]]:
    """Every number that follows from bytes per token and a given KV memory; and the cases that cannot be asked."""
    checks: list[Check] = []
    left_out: dict[str, str] = {}
    for case in cases.cases:
        name = case["id"]
        request = cases.request(case)
        if request is None:
            left_out[name] = "no config is known for its model"
            continue
        if name in NOT_ASKED:
            left_out[name] = NOT_ASKED[name]
            continue
        try:
            low, high = answers(request, case)
        except KvctlError as error:
            left_out[name] = error.message
            continue
        wanted = case.get("derived_bytes_per_token_per_gpu")
        if wanted is not None:
            ours = low.bytes_per_token_per_gpu
            checks.append(Check(name, "bytes/token", wanted, ours, ours))
        checks += capacity_checks(case, low, high)
        checks += cpu_block_checks(case, low)
    return checks, left_out


def answers(request: SizeRequest, case: dict[str, Any]) -> tuple[SizeAnswer, SizeAnswer]:
    """Answers at both ends of the printed KV memory (or for the printed block count)."""
    observed = case["observed"]
    amounts = [0, 0]
    if "kv_bytes" in observed:
        amounts = [observed["kv_bytes"]] * 2
    elif observed.get("kv_gib", -1) > 0:
        amounts = [int((observed["kv_gib"] - PRINTED_GIB) * GIB), int((observed["kv_gib"] + PRINTED_GIB) * GIB)]
    elif "kv_mib" in observed:
        amounts = [int(observed["kv_mib"] * 2**20)] * 2
    elif "num_blocks" in observed:
        block = size_up(request).pool
        amounts = [observed["num_blocks"] * (block.block_bytes if block else 0)] * 2
    elif "k_gib" in observed:
        kv = (observed["k_gib"] + observed["v_gib"]) * GIB
        amounts = [int(kv - 2 * PRINTED_GIB * GIB), int(kv + 2 * PRINTED_GIB * GIB)]
    else:
        answer = size_up(request)
        return answer, answer
    low, high = (size_up(SizeRequest(**{**fields_of(request), "kv_bytes": amount})) for amount in amounts)
    return low, high


def is_asked_in_blocks(observed: dict[str, Any]) -> bool:
    """Whether the log prints no amount of memory: then its block count is the question and no answer."""
    return not any(name in observed for name in ("kv_bytes", "kv_gib", "kv_mib", "k_gib"))


def fields_of(request: SizeRequest) -> dict[str, Any]:
    return {name: getattr(request, name) for name in request.__dataclass_fields__}


def capacity_checks(case: dict[str, Any], low: SizeAnswer, high: SizeAnswer) -> list[Check]:
    observed, name = case["observed"], case["id"]
    if low.capacity is None or high.capacity is None:
        return []
    checks = []
    first, last = low.capacity, high.capacity
    for what, attribute in (("blocks", "num_blocks"), ("tokens", "kv_tokens"), ("longest", "max_context_tokens")):
        key = {"blocks": "num_blocks", "tokens": "kv_tokens", "longest": "est_max_len"}[what]
        if key in observed and not (what == "blocks" and is_asked_in_blocks(observed)):
            checks.append(Check(name, what, observed[key], getattr(first, attribute), getattr(last, attribute)))
    if "concurrency" in observed and case["inputs"].get("max_model_len"):
        ends = round(first.max_concurrency, 2), round(last.max_concurrency, 2)
        checks.append(Check(name, "concurrency", observed["concurrency"], *ends))
    if "needed_gib" in observed:
        needed = first.needed_bytes / GIB
        checks.append(Check(name, "needed GiB", observed["needed_gib"], needed - PRINTED_GIB, needed + PRINTED_GIB))
    if "mamba_slots" in observed:
        ends = first.state_slots or 0, last.state_slots or 0
        checks.append(Check(name, "state slots", observed["mamba_slots"], *ends))
    if "attention_block_size" in observed and low.pool is not None:
        size = low.pool.block_tokens
        checks.append(Check(name, "block tokens", observed["attention_block_size"], size, size))
    return checks


def cpu_block_checks(case: dict[str, Any], answer: SizeAnswer) -> list[Check]:
    """V0 printed how many blocks its swap space holds, which pins the bytes of a token exactly."""
    if "cpu_blocks" not in case["observed"] or not answer.pool:
        return []
    match = re.search(r"swap_space (\d+)", case["inputs"].get("flags") or "")
    blocks = (int(match[1]) if match else SWAP_GIB) * GIB // (16 * answer.stored_bytes_per_token_per_gpu)
    return [Check(case["id"], "CPU blocks", case["observed"]["cpu_blocks"], blocks, blocks)]


def observed_kv_bytes(case: dict[str, Any]) -> float | None:
    observed, per_token = case["observed"], case.get("derived_bytes_per_token_per_gpu")
    if "kv_bytes" in observed:
        return float(observed["kv_bytes"])
    if "kv_gib" in observed:
        return float(observed["kv_gib"] * GIB)
    if "num_blocks" in observed and per_token:
        return float(observed["num_blocks"] * 16 * per_token)
    return None


def memory_request(cases: Cases, case: dict[str, Any]) -> SizeRequest | None:
    """The question about a run whose GPU and utilisation are printed; None where the log leaves one out.

    A V0 run must print max_model_len too: its profiling step is that long.
    """
    inputs = case["inputs"]
    gpu = cases.gpu(case)
    printed_total = inputs.get("gpu_gib")
    is_exact = isinstance(printed_total, float) and not printed_total.is_integer()
    if "gpu_memory_utilization" not in inputs or observed_kv_bytes(case) is None or case["engine"] != "vllm":
        return None
    if "kv_cache_memory_bytes" in (inputs.get("flags") or "") or (gpu is None and not is_exact):
        return None
    if "V0" in str(case.get("version")) and "max_model_len" not in inputs:
        return None
    request = cases.request(case)
    if request is None or case["id"] in cases.extra["not_plain"]:
        return None
    return SizeRequest(
        **{
            **fields_of(request),
            "hardware": gpu,
            "total_bytes": int(printed_total * GIB) if is_exact else None,
            "kv_bytes": None,
        }
    )


def memory_checks(cases: Cases) -> tuple[list[MemoryCheck], dict[str, str]]:
    """KV memory from the profile alone, of every run that prints its GPU and utilisation."""
    checks, left_out = [], {}
    for case in cases.cases:
        request = memory_request(cases, case)
        if request is None:
            continue
        try:
            answer = size_up(request)
        except KvctlError as error:
            left_out[case["id"]] = error.message
            continue
        assert answer.budget is not None
        checks.append(_memory_check(case, request, answer))
    return checks, left_out


def _memory_check(case: dict[str, Any], request: SizeRequest, answer: SizeAnswer) -> MemoryCheck:
    assert answer.budget is not None
    kv = answer.budget.kv
    gpu = request.hardware.id if request.hardware else f"{(request.total_bytes or 0) / GIB:.2f} GiB"
    observed = observed_kv_bytes(case)
    assert observed is not None
    return MemoryCheck(case["id"], gpu, observed / GIB, kv.low / GIB, kv.value / GIB, kv.high / GIB)


def calibrated_checks(cases: Cases) -> list[MemoryCheck]:
    """Predict a run after calibrating on another log of the same machine."""
    by_id = {case["id"]: case for case in cases.cases}
    checks = []
    for first, second in cases.extra["same_machine"]:
        taught, asked = (_calibration_request(cases, by_id[name]) for name in (first, second))
        if taught is None or asked is None:
            continue
        observed = observed_kv_bytes(by_id[first])
        assert observed is not None
        learnt = calibrate(taught, ServerLog(kv_bytes=int(observed)), source=first, learnt_on="")
        overheads: Overheads = learnt.overheads_for(asked.model.id)
        answer = size_up(SizeRequest(**{**fields_of(asked), "learnt": overheads}))
        checks.append(_memory_check(by_id[second], asked, answer))
    return checks


def _calibration_request(cases: Cases, case: dict[str, Any]) -> SizeRequest | None:
    request = cases.request(case)
    gpu = cases.gpu(case)
    if request is None or gpu is None:
        return None
    return SizeRequest(**{**fields_of(request), "hardware": gpu, "kv_bytes": None})


def summary(checks: list[MemoryCheck]) -> tuple[float, float]:
    """Median absolute error and the share of cases inside the printed range."""
    return (
        statistics.median(abs(c.error) for c in checks),
        sum(c.is_covered for c in checks) / len(checks),
    )


def print_memory(title: str, checks: list[MemoryCheck]) -> None:
    print(f"\n{title}\n")
    print("| case | GPU | printed GiB | predicted GiB | range | error |")
    print("|---|---|---:|---:|---|---:|")
    for c in sorted(checks, key=lambda c: abs(c.error)):
        inside = "" if c.is_covered else " (outside)"
        print(
            f"| {c.case} | {c.gpu} | {c.observed_gib:.2f} | {c.value_gib:.2f} "
            f"| {c.low_gib:.2f} .. {c.high_gib:.2f}{inside} | {c.error:+.1%} |"
        )
    median, covered = summary(checks)
    print(f"\n{len(checks)} cases: median error {median:.1%}, {covered:.0%} inside the printed range.")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--logs", type=Path, default=DATA / "server_logs.yaml")
    parser.add_argument("--models", type=Path, default=DATA / "case_models.yaml")
    parser.add_argument("--all", action="store_true", help="print every check, not only those that are off")
    options = parser.parse_args()
    cases = Cases(options.logs, options.models)
    checks, left_out = rule_checks(cases)
    print("## Rules: numbers that follow from a given KV memory\n")
    print("| number | checks | hold |")
    print("|---|---:|---:|")
    for what in dict.fromkeys(c.what for c in checks):
        mine = [c for c in checks if c.what == what]
        print(f"| {what} | {len(mine)} | {sum(c.holds for c in mine)} |")
    by_case: dict[str, bool] = {}
    for c in checks:
        by_case[c.case] = by_case.get(c.case, True) and c.holds
    right = sum(by_case.values())
    print(f"\n{len(by_case)} cases with checks, all hold in {right} ({right / len(by_case):.1%}).")
    for c in checks:
        if options.all or not c.holds:
            print(
                f"- {c.case}: {c.what} printed {c.observed:g}, ours {c.low:g} .. {c.high:g}. "
                f"{EXPLAINED.get(c.case, '' if c.holds else 'NOT EXPLAINED')}"
            )
    for name, why in left_out.items():
        print(f"- {name}: not asked ({why})")
    memory, memory_left = memory_checks(cases)
    print_memory("## KV memory from the GPU profile alone", memory)
    for name, why in memory_left.items():
        print(f"- {name}: not asked ({why})")
    print_memory("## KV memory after calibrating on another log of the same machine", calibrated_checks(cases))
    return 0 if all(c.holds or c.case in EXPLAINED for c in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
