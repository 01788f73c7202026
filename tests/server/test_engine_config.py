import json

import pytest

from kvctl.engine.config import DeviceConfig
from kvctl.engine.model_source import ModelFacts
from kvctl.errors import ConfigError
from kvctl.server import engine_config
from kvctl.server.config import AUTO_LENGTH, ModelOptions, SchedulerOptions, ServeConfig
from kvctl.server.engine_config import (
    Gpu,
    build_engine_config,
    build_scheduler_config,
    find_gpu,
    read_chat_template,
    read_sampling_defaults,
)
from kvctl.units import GIB

FACTS = ModelFacts(
    max_model_len=8192,
    vocab_size=100,
    eos_token_ids=(2,),
    generation_config={"temperature": 0.6, "top_p": 0.9, "do_sample": True},
)
H200, L4, A100 = Gpu("NVIDIA H200", 139 * GIB), Gpu("NVIDIA L4", 22 * GIB), Gpu("NVIDIA A100-SXM4-80GB", 79 * GIB)
B200 = Gpu("NVIDIA B200", 178 * GIB)


@pytest.mark.parametrize(
    ("gpu", "batched", "seqs"),
    [(L4, 2048, 256), (A100, 8192, 256), (H200, 8192, 1024), (B200, 16384, 1024)],
)
def test_default_limits_are_vllms(gpu, batched, seqs):
    config = build_scheduler_config(SchedulerOptions(), 100_000, gpu)
    assert (config.max_num_batched_tokens, config.max_num_seqs) == (batched, seqs)
    doubled = build_scheduler_config(SchedulerOptions(performance_mode="throughput"), 100_000, gpu)
    assert (doubled.max_num_batched_tokens, doubled.max_num_seqs) == (2 * batched, 2 * seqs)


@pytest.mark.parametrize(
    ("mode", "batched", "seqs"), [("balanced", 512, 128), ("throughput", 1024, 256), ("interactivity", 256, 128)]
)
def test_steps_on_a_cpu_are_small(mode, batched, seqs):
    config = build_scheduler_config(SchedulerOptions(performance_mode=mode), 100_000, None)
    assert (config.max_num_batched_tokens, config.max_num_seqs) == (batched, seqs)


def test_defaults_are_clipped_to_what_can_be_of_use():
    assert build_scheduler_config(SchedulerOptions(max_num_seqs=2), 100, None).max_num_batched_tokens == 200
    assert build_scheduler_config(SchedulerOptions(max_num_batched_tokens=64), 100, None).max_num_seqs == 64
    assert build_scheduler_config(SchedulerOptions(max_num_seqs=5000), 8192, None).max_num_batched_tokens == 5000
    unchunked = build_scheduler_config(SchedulerOptions(enable_chunked_prefill=False), 8192, None)
    assert unchunked.max_num_batched_tokens == 8192


def test_a_contradiction_that_was_asked_for_is_refused():
    with pytest.raises(ConfigError, match="--max-num-batched-tokens 8 is under --max-num-seqs 9"):
        build_scheduler_config(SchedulerOptions(max_num_seqs=9, max_num_batched_tokens=8), 100, None)
    with pytest.raises(ConfigError, match="over the model's own length of 8192"):
        build_engine_config(ServeConfig(model=ModelOptions(max_model_len=8193)), FACTS, "folder")


def test_an_automatic_length_is_the_models_own_and_the_engine_may_lower_it():
    config = build_engine_config(ServeConfig(model=ModelOptions(max_model_len=AUTO_LENGTH)), FACTS, "folder")
    assert config.scheduler.max_model_len == 8192 and config.fit_max_model_len
    assert not build_engine_config(ServeConfig(), FACTS, "folder").fit_max_model_len


def test_the_gpu_is_asked_of_the_driver_only_where_it_can_be_used(monkeypatch, tmp_path):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA H200, 143771'\n")
    program.chmod(0o755)
    monkeypatch.setattr(engine_config, "_NVIDIA_DEVICE", tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setattr(engine_config, "version", lambda _: "2.13.0+cu130")
    assert find_gpu(DeviceConfig()) == Gpu("NVIDIA H200", 143771 << 20)
    assert find_gpu(DeviceConfig(device="cpu")) is None
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert find_gpu(DeviceConfig()) is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    program.write_text("#!/bin/sh\nexit 9\n")
    assert find_gpu(DeviceConfig()) == Gpu("unknown", 0)
    monkeypatch.setattr(engine_config, "version", lambda _: "2.13.0+cpu")
    assert find_gpu(DeviceConfig()) is None


def test_sampling_defaults_come_from_the_model_a_file_or_nowhere_and_can_be_overridden(tmp_path):
    own = read_sampling_defaults(ModelOptions(), FACTS)
    assert (own.temperature, own.top_p, own.top_k) == (0.6, 0.9, 0)
    assert read_sampling_defaults(ModelOptions(generation_config="vllm"), FACTS).temperature == 1.0
    (tmp_path / "generation_config.json").write_text(json.dumps({"top_k": 7, "max_new_tokens": 9}))
    for place in (tmp_path, tmp_path / "generation_config.json"):
        read = read_sampling_defaults(ModelOptions(generation_config=str(place)), FACTS)
        assert (read.top_k, read.max_new_tokens, read.temperature) == (7, 9, 1.0)
    changed = read_sampling_defaults(ModelOptions(override_generation_config={"temperature": 0}), FACTS)
    assert (changed.temperature, changed.top_p) == (0, 0.9)


@pytest.mark.parametrize("content", ["{", "[1]", '{"temperature": "hot"}', '{"top_p": 2}', '{"top_k": true}'])
def test_an_impossible_generation_config_is_refused(tmp_path, content):
    path = tmp_path / "g.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match="generation"):
        read_sampling_defaults(ModelOptions(generation_config=str(path)), FACTS)


def test_a_chat_template_is_a_file_or_the_text_itself(tmp_path):
    path = tmp_path / "t.jinja"
    path.write_text("{{ messages }}")
    assert read_chat_template(str(path)) == read_chat_template("{{ messages }}") == "{{ messages }}"
    assert read_chat_template(None) is None
    with pytest.raises(ConfigError, match="--chat-template"):
        read_chat_template("missing.jinja")
    with pytest.raises(ConfigError, match="--chat-template: the chat template is not valid Jinja"):
        read_chat_template("{% if %}")
