"""Reading start-up logs and metrics pages, and learning from them."""

from pathlib import Path

import pytest

from kvctl.errors import InvalidRequest, KvctlError
from kvctl.model.hardware import find_hardware
from kvctl.sizing.calibration import calibrate, calibration_file, store_calibration, stored_calibration
from kvctl.sizing.memory import Overheads
from kvctl.sizing.request import SizeRequest, size_up
from kvctl.sizing.server_log import ServerLog, parse_server_log
from kvctl.sizing.sized_model import load_model
from kvctl.units import GIB

V0_LOG = """
INFO 11-20 10:01:02 api_server.py:585] vLLM API server version 0.6.4.post1
INFO 11-20 10:01:02 api_server.py:586] args: Namespace(model='meta-llama/Llama-3.1-8B-Instruct', max_model_len=20000,
INFO 11-20 10:01:30 model_runner.py:1077] Loading model weights took 14.9888 GB
INFO 11-20 10:01:40 worker.py:232] Memory profiling results: total_gpu_memory=79.15GiB initial_memory_usage=15GiB
INFO the current vLLM instance can use total_gpu_memory (79.15GiB) x gpu_memory_utilization (0.70) = 55.41GiB
INFO model weights take 8.63GiB; non_torch_memory takes 0.09GiB; PyTorch activation peak memory takes 1.16GiB; \
the rest of the memory reserved for KV Cache is 45.21GiB.
INFO # cuda blocks: 14815, # CPU blocks: 1966
INFO Maximum concurrency for 512 tokens per request: 462.97x
"""
V1_LOG = """
(APIServer pid=1) INFO non-default args: {'model': 'Qwen/Qwen3-30B-A3B', 'max_model_len': 32768, \
'gpu_memory_utilization': 0.95, 'tensor_parallel_size': 2, 'max_num_seqs': 64}
(EngineCore_DP0 pid=9) INFO Initializing a V1 LLM engine (v0.10.2) with config
(Worker_TP0 pid=11) INFO Model loading took 14.5331 GiB and 12.3 seconds
(Worker_TP0 pid=11) INFO Available KV cache memory: 25.95 GiB
(Worker_TP1 pid=12) INFO Available KV cache memory: 25.91 GiB
(EngineCore_DP0 pid=9) INFO GPU KV cache size: 566,016 tokens
(EngineCore_DP0 pid=9) INFO Maximum concurrency for 32,768 tokens per request: 17.27x
(Worker_TP0 pid=11) INFO Graph capturing finished in 20 secs, took 0.67 GiB
"""
SGLANG_LOG = """
[2025-10-01] server_args=ServerArgs(model_path='x', mem_fraction_static=0.88, tp_size=1, context_length=None)
[2025-10-01] Load weight end. type=LlamaForCausalLM, dtype=torch.bfloat16, avail mem=7.1 GB, mem usage=15.08 GB.
[2025-10-01] KV Cache is allocated. #tokens: 248479, K size: 4.27 GB, V size: 4.27 GB
"""
METRICS = """
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",cache_dtype="auto",gpu_memory_utilization="0.9",num_gpu_blocks="4153"} 1.0
"""


def test_a_v0_log_is_read() -> None:
    log = parse_server_log(V0_LOG)
    assert log.version == "0.6.4"
    assert log.total_bytes == int(79.15 * GIB)
    assert (log.utilization, log.num_blocks, log.concurrency, log.max_model_len) == (0.7, 14815, 462.97, 20000)
    assert log.kv_bytes == int(45.21 * GIB)
    assert log.non_torch_bytes == int(0.09 * GIB)


def test_a_v1_log_counts_the_smallest_rank() -> None:
    log = parse_server_log(V1_LOG)
    assert log.kv_bytes == int(25.91 * GIB)
    assert (log.engine, log.version, log.model) == ("vllm", "0.10.2", "Qwen/Qwen3-30B-A3B")
    assert (log.tensor_parallel, log.max_num_seqs, log.kv_tokens) == (2, 64, 566_016)


def test_an_sglang_log_adds_keys_and_values() -> None:
    log = parse_server_log(SGLANG_LOG)
    assert log.engine == "sglang"
    assert log.kv_bytes == 2 * int(4.27 * GIB)
    assert log.utilization == 0.88


def test_a_metrics_page_gives_blocks() -> None:
    log = parse_server_log(METRICS)
    assert (log.num_blocks, log.block_size, log.utilization) == (4153, 16, 0.9)


@pytest.mark.parametrize("text", ["", "hello", "\0" * 100, "KV cache size: tokens", "gpu_memory_utilization=" * 99])
def test_other_texts_say_nothing(text: str) -> None:
    assert parse_server_log(text).is_empty


def request(**choices) -> SizeRequest:
    return SizeRequest(
        model=load_model("Qwen/Qwen3-30B-A3B-FP8"), hardware=find_hardware("l40s"), engine="vllm@0.10.2", **choices
    )


def test_a_calibrated_prediction_gives_the_run_back_and_a_narrow_range() -> None:
    learnt = calibrate(request(), parse_server_log(V1_LOG), source="log", learnt_on="2026-01-01")
    again = size_up(
        request(
            utilization=0.95,
            max_model_len=32768,
            max_num_seqs=64,
            parallel=_two(),
            learnt=learnt.overheads_for(learnt.model),
        )
    )
    assert again.budget is not None
    assert again.budget.kv.value == pytest.approx(25.91 * GIB, rel=0.001)
    assert again.budget.kv.high - again.budget.kv.low <= 0.021 * again.budget.total_bytes


def _two():
    from kvctl.model.weight_size import Parallelism

    return Parallelism(2)


def test_what_another_model_learns_leaves_the_weights_alone() -> None:
    learnt = calibrate(request(), parse_server_log(V1_LOG), source="log", learnt_on="2026-01-01")
    assert learnt.overheads_for("another/model").weight_factor is None
    assert learnt.overheads_for(learnt.model).weight_factor is not None


def test_calibrations_are_kept_with_their_provenance(tmp_path: Path) -> None:
    path = calibration_file({"XDG_STATE_HOME": str(tmp_path)})
    learnt = calibrate(request(), parse_server_log(V1_LOG), source="server.log", learnt_on="2026-01-01")
    store_calibration(learnt, path)
    assert stored_calibration("l40s", "vllm", path) == learnt
    assert stored_calibration("l40s", "sglang", path) is None
    assert (learnt.source, learnt.learnt_on, learnt.model) == ("server.log", "2026-01-01", "Qwen/Qwen3-30B-A3B-FP8")


@pytest.mark.parametrize("content", ["{", "[]", '{"l40s/vllm": {"x": 1}}'])
def test_a_damaged_store_is_told_or_empty(tmp_path: Path, content: str) -> None:
    path = tmp_path / "calibration.json"
    path.write_text(content)
    if content == "[]":
        assert stored_calibration("l40s", "vllm", path) is None
    else:
        with pytest.raises(KvctlError, match="calibration"):
            stored_calibration("l40s", "vllm", path)


def test_a_log_without_memory_teaches_nothing() -> None:
    with pytest.raises(InvalidRequest, match="says nothing"):
        calibrate(request(), ServerLog(), source="x", learnt_on="")


def test_overheads_that_were_not_learnt_change_nothing() -> None:
    plain, neutral = size_up(request()), size_up(request(learnt=Overheads()))
    assert plain.budget == neutral.budget


KVCTL_LOG = """INFO 11-29 16:25:48 kvctl 0.1.0 serves /models/SmolLM2-135M-Instruct as SmolLM2-135M-Instruct
INFO 11-29 16:25:55 Memory: weights 256.6 MiB, free now 20.7 GiB, KV cache 200.0 MiB{how}
INFO 11-29 16:25:55 KV blocks: 568 of 16 tokens, 360.0 KiB each, 199.7 MiB in all
INFO 11-29 16:25:55 KV cache size: 9,088 tokens, Maximum concurrency for 8,192 tokens per request: 1.11x
"""


def test_a_kvctl_log_is_read_in_its_own_units() -> None:
    log = parse_server_log(KVCTL_LOG.format(how=" (--kv-cache-memory-bytes)"))
    assert (log.engine, log.num_blocks, log.block_size, log.block_bytes) == ("kvctl", 568, 16, 360 * 1024)
    assert log.weights_bytes == pytest.approx(134_515_008 * 2, rel=0.001)
    assert log.given_kv_bytes == 200 << 20
    assert parse_server_log(KVCTL_LOG.format(how="")).given_kv_bytes is None


@pytest.mark.parametrize(
    "text", [KVCTL_LOG.format(how=" (--kv-cache-memory-bytes)"), f"{V1_LOG}\nargs: {{'kv_cache_memory_bytes': 99}}"]
)
def test_kv_memory_that_was_set_outright_teaches_no_overheads(text: str) -> None:
    with pytest.raises(InvalidRequest, match="set outright"):
        calibrate(request(), parse_server_log(text), source="x", learnt_on="")


@pytest.mark.parametrize(("text", "what"), [(KVCTL_LOG.format(how=""), "KV blocks"), (V1_LOG, "weights")])
def test_the_log_of_another_model_is_refused(text: str, what: str) -> None:
    other = SizeRequest(model=load_model("Qwen/Qwen2.5-7B-Instruct"), hardware=find_hardware("l4"))
    with pytest.raises(InvalidRequest, match=f"another model or setup: {what}"):
        calibrate(other, parse_server_log(text), source="x", learnt_on="")
