"""What building an engine reports, refuses and decides."""

import logging
import re

import pytest
import torch

from kvctl.core.config import SchedulerConfig
from kvctl.engine import build as build_module
from kvctl.engine import memory_budget
from kvctl.engine.config import DeviceConfig
from kvctl.engine.memory_budget import CPU_LIMIT_BYTES, cpu_budget, cuda_budget
from kvctl.errors import OutOfMemory
from tests.support import engine_runs, tiny_models

GIB = 1 << 30


@pytest.fixture
def folder(tiny_folder):
    return tiny_folder(tiny_models.LLAMA)[1]


def test_the_log_tells_the_budget_and_the_capacity_in_vllms_words(folder):
    engine = engine_runs.start(folder, num_blocks=None, kv_cache_memory_bytes=1 << 20, max_model_len=200)
    # a block: 16 tokens x 3 layers x (key + value) x 2 heads x 8 x 4 bytes = 6,144 bytes
    blocks = (1 << 20) // 6144
    assert engine.info.num_blocks == blocks
    assert engine.info.kv_cache_bytes == blocks * 6144
    text = "\n".join(engine.lines)
    assert "weights 256.3 KiB" in text
    assert "KV cache 1.00 MiB (--kv-cache-memory-bytes)" in text
    concurrency = blocks / 13
    assert engine.lines[-1] == (
        f"KV cache size: {int(concurrency * 200):,} tokens, Maximum concurrency for 200 tokens per request: "
        f"{concurrency:.2f}x"
    )
    assert engine.info.kv_tokens == int(concurrency * 200)
    assert engine.info.max_concurrency == concurrency


def test_the_default_cache_is_no_larger_than_any_load_could_use(folder):
    engine = engine_runs.start(folder, num_blocks=None, max_model_len=100, max_num_seqs=5)
    assert engine.info.num_blocks == 5 * 7 + 1


def test_an_override_sets_the_blocks_and_is_told(folder):
    engine = engine_runs.start(folder, num_blocks=50, max_model_len=100)
    assert engine.info.num_blocks == 50
    assert any("num_gpu_blocks_override=50" in line for line in engine.lines)


def test_one_request_that_cannot_fit_is_told_with_needed_available_and_advice(folder):
    with pytest.raises(OutOfMemory) as caught:
        engine_runs.start(folder, num_blocks=None, kv_cache_memory_bytes=50_000, max_model_len=256)
    assert "256 tokens needs 102.0 KiB" in caught.value.message
    assert "available are 48.8 KiB" in caught.value.message
    assert "112 tokens would fit" in caught.value.message
    assert "--max-model-len" in caught.value.hint


@pytest.mark.parametrize(
    "tiny", [tiny_models.LLAMA, tiny_models.MISTRAL_SLIDING, tiny_models.GEMMA3], ids=lambda tiny: tiny.name
)
@pytest.mark.parametrize("batched", [8, 64])
def test_the_smallest_cache_that_starts_takes_every_request_that_max_model_len_allows(tiny, batched, tiny_folder):
    """So a request is refused for its length before its stream begins, or served: never for the cache alone."""
    folder = tiny_folder(tiny)[1]
    options = {"max_model_len": 100, "max_num_seqs": 4, "max_num_batched_tokens": batched}
    with pytest.raises(OutOfMemory) as caught:
        engine_runs.start(folder, num_blocks=2, **options)
    needed = int(re.search(r"\(([\d,]+) blocks\), available", caught.value.message).group(1).replace(",", ""))
    engine = engine_runs.start(folder, num_blocks=needed, **options)
    assert engine.core.scheduler.kv_cache_manager.capacity_tokens(engine.info.max_model_len) == 100
    results = engine.run([list(range(3, 102)), list(range(4, 54))], engine_runs.greedy(50))
    assert [len(result.token_ids) for result in results] == [1, 50]


def test_a_cache_larger_than_the_free_memory_is_refused_not_left_to_the_kernel(folder):
    with pytest.raises(OutOfMemory, match="are free"):
        engine_runs.start(folder, num_blocks=None, kv_cache_memory_bytes=1 << 50)


def test_weights_that_cannot_fit_are_refused_before_any_is_loaded(folder, monkeypatch):
    monkeypatch.setattr("kvctl.engine.build.free_device_bytes", lambda device: 100_000)
    monkeypatch.setattr("kvctl.engine.build.build_decoder", None)  # not reached
    with pytest.raises(OutOfMemory, match=r"the weights need 256\.3 KiB, 97\.7 KiB are free on cpu"):
        engine_runs.start(folder)


@pytest.mark.parametrize(
    ("free", "expected"),
    [(1 * GIB, int(0.4 * GIB)), (100 * GIB, CPU_LIMIT_BYTES), (None, 1 * GIB)],
)
def test_the_cpu_default_is_a_share_of_what_is_free(monkeypatch, free, expected):
    monkeypatch.setattr(memory_budget, "available_host_bytes", lambda: free)
    budget = cpu_budget(DeviceConfig(), weight_bytes=5 * GIB)
    assert budget.kv_cache_bytes == expected
    assert budget.ceiling_bytes == free


@pytest.fixture
def fake_cuda(monkeypatch):
    """A device of 80 GiB: 16 of weights, a step that peaks at 3 more, 2 held by others; 17 reserved by torch."""
    state = {"peak": 16 * GIB}
    values = {
        "synchronize": lambda device: None,
        "reset_peak_memory_stats": lambda device: None,
        "empty_cache": lambda: None,
        "memory_allocated": lambda device: 16 * GIB,
        "max_memory_allocated": lambda device: state["peak"],
        "memory_reserved": lambda device: 17 * GIB,
        "mem_get_info": lambda device: (61 * GIB, 80 * GIB),
        "get_device_name": lambda device: "H100",
    }
    for name, value in values.items():
        monkeypatch.setattr(f"torch.cuda.{name}", value)
    return lambda: state.update(peak=19 * GIB)


def test_the_cuda_budget_is_the_share_less_weights_peak_and_others(fake_cuda):
    device = torch.device("cuda", 0)
    budget = cuda_budget(DeviceConfig(gpu_memory_utilization=0.9), 16 * GIB, device, fake_cuda)
    assert budget.kv_cache_bytes == int(80 * GIB * 0.9) - 17 * GIB - 3 * GIB - 2 * GIB
    assert budget.ceiling_bytes == 58 * GIB
    assert "peak activation 3.00 GiB" in budget.lines[0] and "outside torch 2.00 GiB" in budget.lines[0]
    assert budget.lines[1] == "Available KV cache memory: 50.0 GiB"
    with_graphs = cuda_budget(
        DeviceConfig(gpu_memory_utilization=0.9), 16 * GIB, device, fake_cuda, graph_bytes=2 * GIB
    )
    assert with_graphs.kv_cache_bytes == budget.kv_cache_bytes - 2 * GIB, "graphs are captured after the cache is there"
    explicit = cuda_budget(DeviceConfig(kv_cache_memory_bytes=5 * GIB), 16 * GIB, device, fake_cuda)
    assert explicit.kv_cache_bytes == 5 * GIB
    with pytest.raises(OutOfMemory, match="no memory is left"):
        cuda_budget(DeviceConfig(gpu_memory_utilization=0.2), 16 * GIB, device, fake_cuda)


def test_the_steps_of_the_profile_run_on_the_null_block_alone(folder, monkeypatch):
    """The CUDA budget's trial steps, on the CPU: small batches, then more tokens than one sequence, every layer."""
    from kvctl.engine import build
    from kvctl.engine.config import EngineConfig, ModelConfig
    from kvctl.engine.models.decoder import Decoder
    from kvctl.engine.profile_steps import run_profile_steps
    from kvctl.sizing.kv_plan import KVLayout

    config = EngineConfig(
        ModelConfig(str(folder), dtype="float32"),
        SchedulerConfig(max_model_len=100, max_num_batched_tokens=250, max_num_seqs=16),
        device=DeviceConfig(device="cpu", cpu_kernels="torch"),
    )
    loaded = build._load_model(config, lambda line: None)
    layout = KVLayout(build.group_layers(loaded.config.windows), 16, 1, 250)
    seen = []
    real = Decoder.forward
    monkeypatch.setattr(Decoder, "forward", lambda self, ids, *rest: (seen.append(len(ids)), real(self, ids, *rest))[1])
    run_profile_steps(loaded.decoder, loaded.device, layout, config.scheduler, torch.float32, {}, "torch")
    assert seen == [1, 2, 2, 4, 4, 8, 8, 16, 16, 250], "each batch size alone and over a shared prefix"


@pytest.mark.parametrize(
    ("capability", "launch", "reason"),
    [
        ((7, 5), None, "compute capability 7.5"),
        ((9, 0), RuntimeError("Failed to find C compiler"), "Failed to find C compiler"),
    ],
    ids=["old GPU", "no compiler"],
)
def test_a_gpu_on_which_triton_cannot_launch_is_served_by_torch_and_told(monkeypatch, capability, launch, reason):
    from kvctl.engine.ops import TorchOps, select_ops, triton_problem
    from kvctl.engine.sampler import TorchSampling, select_sampling
    from kvctl.engine.sampler_random import race
    from kvctl_kernels.triton_ops import TritonOps

    def fail(*_):
        raise launch

    device = torch.device("cuda", 0)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: capability)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "T4")
    monkeypatch.setattr("torch.ones", lambda *shape, device: torch.zeros(1, 16))
    monkeypatch.setattr(TritonOps, "__init__", lambda self, device: None)
    monkeypatch.setattr(TritonOps, "rms_norm", fail)
    triton_problem.cache_clear()
    try:
        ops = select_ops(device, torch.bfloat16)
        assert isinstance(ops, TorchOps) and reason in ops.reason
        sampling = select_sampling(device)
        assert isinstance(sampling, TorchSampling) and sampling._race is race
    finally:
        triton_problem.cache_clear()


def test_an_engine_that_is_let_go_gives_its_memory_back_at_once(folder):
    """A second engine in the same process must find the device free: no cycle keeps the first until the next gc."""
    import gc
    import weakref

    from tests.support.engine_runs import greedy, start

    gc.collect()
    gc.disable()
    try:
        engine = start(folder)
        engine.run([[5, 6, 7]], greedy(2))
        cache = weakref.ref(engine.core.runner._kv_cache.layers[0].k_cache)
        engine.core.close()
        del engine
        assert cache() is None
    finally:
        gc.enable()


def test_the_builder_needs_neither_server_nor_wire_packages(folder):
    """The device machine has torch but none of these."""
    import subprocess
    import sys

    code = (
        "import sys\n"
        "for name in ('fastapi', 'uvicorn', 'zmq', 'msgspec', 'gguf', 'transformers', 'safetensors'):\n"
        "    sys.modules[name] = None\n"
        "from tests.support import engine_runs\n"
        "print(engine_runs.start(sys.argv[1]).run([[5, 6]], engine_runs.greedy(3))[0].token_ids)\n"
    )
    ran = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True)
    assert ran.stdout.startswith("[")


def test_compiling_the_kernels_is_told(folder, monkeypatch):
    """The first start on a machine must not look like a hang."""
    real = build_module.select_ops

    def compiling(*args):
        logging.getLogger("kvctl_kernels.cpu_build").info("Compiling the CPU kernels for this machine, once")
        return real(*args)

    monkeypatch.setattr(build_module, "select_ops", compiling)
    lines = engine_runs.start(folder, cpu_kernels="auto").lines
    assert "Compiling the CPU kernels for this machine, once" in lines
    assert not logging.getLogger("kvctl_kernels").handlers
