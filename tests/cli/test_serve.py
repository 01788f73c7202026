import re
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from kvctl.cli.app import build_app
from kvctl.cli.serve import build_config
from kvctl.cli.vllm_flags import IGNORED, REFUSED, REFUSED_SWITCHES, translate
from kvctl.errors import ConfigError, KvctlError
from kvctl.server.config import AUTO_LENGTH


@pytest.fixture
def parse(monkeypatch):
    """Run the command line up to the configuration."""
    configs = []
    monkeypatch.setattr("kvctl.server.launch.launch", configs.append)
    monkeypatch.delenv("KVCTL_API_KEY", raising=False)
    monkeypatch.delenv("VLLM_API_KEY", raising=False)

    def run(*arguments, env=None):
        configs.clear()
        result = CliRunner().invoke(build_app(["serve"]), ["serve", *arguments], env=env)
        if isinstance(result.exception, KvctlError):
            raise result.exception
        assert result.exit_code == 0, result.output
        return configs[0]

    return run


def test_defaults_are_vllms(parse):
    config = parse()
    assert config.model.name is None and config.model.max_model_len is None and config.model.max_logprobs == 20
    assert config.network.host == "127.0.0.1" and config.network.port == 8000
    assert config.cache.block_size == 16 and config.cache.enable_prefix_caching
    assert config.device.gpu_memory_utilization == 0.92 and config.scheduler.reserve_full_isl
    assert config.shutdown_timeout_s == 0 and config.max_num_queued_reqs is None
    assert config.stall_timeout_s == 60


def test_a_vllm_command_line_just_works(parse, capsys):
    config = parse(
        "org/model",
        "--served_model_name",
        "a",
        "b",
        "--tensor-parallel-size=1",
        "-tp",
        "1",
        "--enforce-eager",
        "--max-model-len",
        "32k",
        "--max-num-seqs=64",
        "--no-enable-prefix-caching",
        "--kv-cache-memory-bytes",
        "12.3GiB",
        "--api-key",
        "k1",
        "k2",
        "--dtype",
        "half",
        "--swap-space",
        "4",
        "--no-enable-log-requests",
        "--disable-access-log",
        "--shutdown-timeout",
        "30",
        "--scheduling-policy",
        "priority",
    )
    assert config.model.name == "org/model" and config.model.served_names == ("a", "b")
    assert config.model.max_model_len == 32_000 and config.model.dtype == "float16"
    assert config.scheduler.max_num_seqs == 64 and config.scheduler.policy == "priority"
    assert config.device.enforce_eager and config.scheduler.async_scheduling
    assert not config.cache.enable_prefix_caching and config.device.kv_cache_memory_bytes == int(12.3 * 2**30)
    assert config.api.api_keys == ("k1", "k2") and not config.network.access_log
    assert config.shutdown_timeout_s == 30


def test_the_stall_timeout_can_be_set_and_switched_off(parse):
    assert parse("--engine-stall-timeout", "2m").stall_timeout_s == 120
    assert parse("--engine-stall-timeout", "0").stall_timeout_s is None


def test_origins_come_one_by_one_or_as_vllms_json_list(parse):
    assert parse("--allowed-origins", '["https://a", "https://b"]').api.allowed_origins == ("https://a", "https://b")
    assert parse("--allowed-origins", "*", "--allowed-origins", "https://a").api.allowed_origins == ("*", "https://a")


def test_a_larger_body_can_be_allowed(parse):
    assert parse().api.max_body_bytes == 8 << 20
    assert parse("--max-body-size", "32MiB").api.max_body_bytes == 32 << 20


def test_auto_length_and_another_dtype_of_the_cache_are_passed_on(parse):
    for text in ("auto", "-1"):
        assert parse("--max-model-len", text).model.max_model_len == AUTO_LENGTH
    assert parse("--kv-cache-dtype", "fp8").device.kv_cache_dtype == "fp8"


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        (["--tensor-parallel-size", "2"], "more than one device"),
        (["-tp=2"], "more than one device"),
        (["--speculative-config", "{}"], "speculative"),
        (["--quantization", "awq"], "quantized"),
        (["-q", "fp8"], "quantized"),
        (["--enable-lora"], "LoRA"),
        (["--enable-auto-tool-choice"], "tool calls"),
        (["--tokenizer", "other"], "tokenizer"),
        (["--hf-token", "secret"], "HF_TOKEN"),
        (["--hf-overrides", '{"rope_scaling": 1}'], "config.json"),
    ],
)
def test_flags_that_would_change_the_answers_are_refused(parse, flags, what):
    with pytest.raises(ConfigError, match=what):
        parse(*flags)


@pytest.mark.parametrize(
    "flags",
    [
        ["--data-parallel-size", "1"],
        ["--no-enable-lora"],
        ["--no-async-scheduling"],
        ["--trust-remote-code"],
        ["--compilation-config", "{}"],
        ["-O", "2"],
        ["--runner", "generate"],
    ],
)
def test_flags_that_change_nothing_are_taken(parse, flags):
    assert parse("m", *flags).model.name == "m"


def test_ignored_flags_are_told_and_the_tables_do_not_contradict_each_other(capsys):
    assert list(translate(["m", "--use-tqdm-on-load", "--swap-space", "4", "--port", "1"])) == ["m", "--port", "1"]
    told = capsys.readouterr().err
    assert "--use-tqdm-on-load is ignored" in told and "--swap-space is ignored" in told
    assert not set(IGNORED) & set(REFUSED) and not (set(IGNORED) | set(REFUSED)) & set(REFUSED_SWITCHES)
    ours = {option for p in _serve_command().params for option in (*p.opts, *p.secondary_opts)}
    assert not ours & (set(IGNORED) | set(REFUSED) | set(REFUSED_SWITCHES))


def _serve_command():
    import typer.main

    return typer.main.get_command(build_app(["serve"])).commands["serve"]


def test_an_unknown_log_level_is_a_usage_error():
    for flag in ("--log-level", "--uvicorn-log-level"):
        assert CliRunner().invoke(build_app(["serve"]), ["serve", flag, "loud"]).exit_code == 2


def test_an_unknown_flag_is_a_usage_error():
    result = CliRunner().invoke(build_app(["serve"]), ["serve", "--max-modle-len", "4"])
    assert result.exit_code == 2 and "--max-modle-len" in result.output


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--max-model-len", "many"], "many"),
        (["--max-model-len", "0"], "0"),
        (["--kv-cache-memory-bytes", "12 apples"], "12 apples"),
        (["--block-size", "0"], "--block-size"),
        (["--max-logprobs", "-2"], "--max-logprobs"),
        (["--override-generation-config", "[1]"], "JSON object"),
        (["--override-generation-config", "{"], "not JSON"),
        (["--shutdown-timeout", "soon"], "soon"),
        (["--max-body-size", "0"], "under a byte"),
        (["--allowed-origins", "[1]"], "--allowed-origins"),
        (["--kv-cache-memory-bytes", "1e308TiB"], "1e308TiB"),
        (["--max-model-len", "1e308G"], "1e308G"),
        (["--config", "/does/not/exist.yaml"], "cannot be read"),
    ],
)
def test_impossible_values_say_what_to_do(parse, flags, text):
    with pytest.raises(ConfigError) as caught:
        parse(*flags)
    assert text in caught.value.message and caught.value.hint


class TestConfigFile:
    def write(self, tmp_path, text):
        path = tmp_path / "serve.yaml"
        path.write_text(text)
        return str(path)

    def test_keys_are_flags_and_the_command_line_wins(self, parse, tmp_path):
        path = self.write(
            tmp_path,
            """
model: from/file
port: 9000
max_model_len: 4K
enable-prefix-caching: false
served-model-name: [x, y]
override-generation-config: {temperature: 0.5}
enforce-eager: true
disable-log-stats: false
tensor-parallel-size: 1
host:
""",
        )
        config = parse("--config", path, "--port", "9001", "--enable-prefix-caching")
        assert config.model.name == "from/file" and config.network.port == 9001
        assert config.model.max_model_len == 4096 and config.cache.enable_prefix_caching
        assert config.model.served_names == ("x", "y")
        assert config.model.override_generation_config == {"temperature": 0.5}
        assert config.log_stats and config.network.host == "127.0.0.1"
        assert parse("from/line", f"--config={path}").model.name == "from/line"

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("- a\n- b", "no flags"),
            ("a: [", "cannot be read"),
            ("quantization: awq", "quantized"),
            ("config: x", "another"),
        ],
    )
    def test_a_wrong_file_is_refused(self, parse, tmp_path, text, message):
        with pytest.raises(ConfigError, match=message):
            parse("--config", self.write(tmp_path, text))

    def test_an_empty_file_changes_nothing(self, parse, tmp_path):
        assert parse("--config", self.write(tmp_path, "")).network.port == 8000


@pytest.mark.parametrize("name", ["KVCTL_API_KEY", "VLLM_API_KEY"])
def test_the_api_key_may_come_from_the_environment(parse, name):
    assert parse(env={name: "secret"}).api.api_keys == ("secret",)
    assert parse("--api-key", "given", env={name: "secret"}).api.api_keys == ("given",)


def test_help_shows_every_flag_in_full_at_eighty_columns():
    result = CliRunner().invoke(build_app(["serve"]), ["serve", "--help"], env={"COLUMNS": "80", "NO_COLOR": "1"})
    assert result.exit_code == 0 and max(map(len, result.output.splitlines())) <= 80
    for param in _serve_command().params:
        flag = param.opts[0]
        shown = flag.replace("--", "--[no-]", 1) if param.secondary_opts else flag
        assert re.search(rf"{re.escape(shown)}\b", result.output), flag
    for panel in ("Model", "KV cache", "Scheduler", "API", "Device", "Observability"):
        assert f"─ {panel} ─" in result.output


def test_help_needs_neither_torch_nor_the_web_stack():
    code = (
        "import sys; sys.argv = ['kvctl', 'serve', '--help']\n"
        "from kvctl.cli.app import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        "print(sorted({'torch', 'fastapi', 'uvicorn', 'transformers', 'tokenizers'} & set(sys.modules)))"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.splitlines()[-1] == "[]"


def test_a_taken_port_is_told_before_anything_else():
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "kvctl", "serve", "/no/such/model", "--port", str(port)]
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
    assert answer.returncode == 1
    lines = answer.stderr.strip().splitlines()
    assert len(lines) == 2 and f"port {port}" in lines[0] and "Traceback" not in answer.stderr


def test_build_config_uses_every_option():
    """An option that nobody reads would be accepted and do nothing."""
    read = set()

    class Watching(dict):
        def __getitem__(self, key):
            read.add(key)
            return super().__getitem__(key)

    command = _serve_command()
    context = command.make_context("serve", [])
    build_config(Watching(context.params))
    assert {p.name for p in command.params} - read <= {"config", "help"}
