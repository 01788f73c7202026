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


PAGES = Path(__file__).parent.parent / "data" / "top"


def test_a_real_vllm_page_whose_kv_memory_was_given_teaches_nothing() -> None:
    """The scrape of a vLLM that was told 2 GiB: 728 blocks of 128 tokens."""
    log = parse_server_log((PAGES / "vllm_under_load_1.txt").read_text())
    assert (log.engine, log.num_blocks, log.block_size, log.given_kv_bytes) == ("vllm", 728, 128, 2 << 30)
    with pytest.raises(InvalidRequest, match="set outright"):
        calibrate(request(), log, source="page", learnt_on="")


def test_a_kvctl_page_says_how_much_kv_memory_it_took() -> None:
    page = (
        'vllm:cache_config_info{block_size="16",num_gpu_blocks="2212",cache_dtype="auto",'
        'kv_cache_memory_bytes="4639162368"} 1.0\nkvctl:kv_cache_size_tokens 35392\n'
    )
    log = parse_server_log(page)
    assert (log.engine, log.kv_bytes, log.given_kv_bytes) == ("kvctl", 4_639_162_368, None)
    asked = SizeRequest(load_model("meta-llama/Llama-3.1-8B-Instruct"), "kvctl", hardware=find_hardware("l4"))
    learnt = calibrate(asked, log, source="page", learnt_on="")
    again = size_up(SizeRequest(asked.model, "kvctl", hardware=asked.hardware, learnt=learnt.overheads_for("")))
    assert again.budget is not None and again.budget.kv.value == pytest.approx(4_639_162_368, rel=1e-6)


@pytest.mark.parametrize(
    ("line", "engine", "kv_gib", "tokens"),
    [
        ("Memory profiling results: total_gpu_memory=23.58GiB peak_torch_memory=17.06GiB non_torch_memory=0.35GiB "
         "kv_cache_size=3.81GiB gpu_memory_utilization=0.90\n# GPU blocks: 1952, # CPU blocks: 2", "vllm", 3.81, None),
        ("worker.py:243] available_kv_cache_memory    53.29GiB\n# cuda blocks: 27284", "vllm", 53.29, None),
        ("(EngineCore pid=8) INFO [gpu_worker.py:508] Available KV cache memory: 5.98 GiB\nINFO GPU KV cache size: "
         "567,978 tokens, Maximum concurrency for 131,072 tokens per request: 4.33x", "vllm", 5.98, 567_978),
        ("[TensorRT-LLM] Allocated 26.91 GiB for max tokens in paged KV cache (220480).", "trtllm", 26.91, 220_480),
        ("llama_kv_cache_unified: size =  768.00 MiB ( 32768 cells,  24 layers,  1/1 seqs)", "llama.cpp", 0.75, 32_768),
        ("sglang\nKV Cache is allocated. #tokens: 9, K size: 4.27 GB, V size: 4.27 GB\nKV Cache is allocated. "
         "#tokens: 8, K size: 4.00 GB, V size: 4.00 GB", "sglang", 8.0, 8),
    ],
)  # fmt: skip
def test_lines_of_every_engine_and_age_are_read(line: str, engine: str, kv_gib: float, tokens: int | None) -> None:
    log = parse_server_log(line)
    assert (log.engine, log.kv_tokens) == (engine, tokens)
    assert log.kv_bytes == pytest.approx(kv_gib * GIB, abs=2)


def test_a_line_of_a_run_with_given_kv_memory_is_told_apart() -> None:
    line = "Initial free memory 93.88 GiB, reserved 49.0 GiB memory for KV Cache as specified by kv_cache_memory_bytes"
    assert parse_server_log(line).given_kv_bytes == 49 * GIB


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


def test_a_damaged_store_is_replaced_by_the_next_calibration(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    path.write_text("{")
    learnt = calibrate(request(), parse_server_log(V1_LOG), source="server.log", learnt_on="2026-01-01")
    store_calibration(learnt, path)
    assert stored_calibration("l40s", "vllm", path) == learnt
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


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
