"""`kvctl size` as a user runs it: pages, JSON, exit codes, bad input, and what it may cost."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvctl.cli import app

ROOT = Path(__file__).parent.parent.parent
QWEN = "Qwen/Qwen2.5-7B-Instruct"
TOP_LEVEL = ["schema_version", "model", "kv", "weights", "memory", "capacity", "speed", "advice", "notes"]


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        found = json.loads(self.out)
        assert isinstance(found, dict)
        return found


@pytest.fixture
def kvctl(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))

    def run(*words: str, stdin: bytes = b"") -> Result:
        monkeypatch.setattr(sys, "argv", ["kvctl", "size", *words])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        code = 0
        try:
            app.main()
        except SystemExit as end:
            code = int(end.code or 0)
        printed = capsys.readouterr()
        return Result(code, printed.out, printed.err)

    return run


def test_a_bare_question_answers_bytes_and_weights(kvctl) -> None:
    result = kvctl(QWEN)
    assert result.code == 0
    assert "56.0 KiB of KV cache per token" in result.out
    assert "392.0 KiB" in result.out


def test_json_without_memory_has_null_memory_and_capacity(kvctl) -> None:
    result = kvctl(QWEN, "--json")
    found = result.json
    assert result.code == 0
    assert list(found)[: len(TOP_LEVEL)] == TOP_LEVEL
    assert found["schema_version"] == 1
    assert found["memory"] is None and found["capacity"] is None and found["speed"] is None
    assert found["kv"]["bytes_per_token"] == 57_344
    assert found["model"]["parameters"] == 7_615_616_512
    assert found["model"]["layers"] == [{"kind": "full", "count": 28}]
    assert found["weights"]["bytes"] == 2 * 7_615_616_512


def test_json_with_a_gpu_has_every_documented_field_and_whole_bytes(kvctl) -> None:
    found = kvctl(QWEN, "--gpu", "h100-sxm", "--engine", "vllm", "--json").json
    assert set(found["kv"]) == {
        "dtype", "bytes_per_token", "bytes_per_token_per_gpu", "block_size", "block_bytes_per_gpu",
        "state_bytes_per_request", "groups",
    }  # fmt: skip
    assert {"gpu", "total_bytes", "requested_bytes", "weights_bytes", "activation_bytes", "graph_bytes",
            "other_bytes", "kv_bytes"} <= set(found["memory"])  # fmt: skip
    assert {"engine", "num_blocks", "usable_blocks", "kv_tokens", "max_model_len", "max_concurrency",
            "max_context_tokens", "fits"} <= set(found["capacity"])  # fmt: skip
    assert {"method", "ridge_flop_per_byte", "prefill_tokens_per_s", "ttft_s", "decode"} <= set(found["speed"])
    row = found["speed"]["decode"][0]
    assert {"batch", "context", "tpot_s", "tokens_per_s", "bound", "kv_read_share"} <= set(row)
    for name, value in walk(found):
        if name.endswith("bytes") or "bytes_" in name:
            assert value is None or isinstance(value, int), name
    for part in ("activation_bytes", "graph_bytes", "other_bytes", "kv_bytes"):
        amounts = found["memory"][part]
        assert amounts["low"] <= amounts["value"] <= amounts["high"]


def walk(value: Any, name: str = ""):
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from walk(inner, key)
    elif isinstance(value, list):
        for inner in value:
            yield from walk(inner, name)
    else:
        yield name, value


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ([QWEN, "--gpu", "h100"], 0),
        (["meta-llama/Llama-3.1-70B-Instruct", "--gpu", "h100"], 4),
        (["deepseek-ai/DeepSeek-V4-Flash", "--kv-cache-memory-bytes", "10GiB", "--engine", "sglang"], 3),
        (["no/such"], 1),
        ([QWEN, "--gpu", "zork"], 2),
        ([QWEN, "--tp", "3"], 2),
        ([QWEN, "--gpu", "l4", "--max-model-len", "1k"], 0),
        ([QWEN, "--gpu", "l4", "--users", "500", "--context", "32k"], 4),
        ([QWEN, "--gpu", "h100", "--users", "4", "--context", "8k", "--output", "1k"], 0),
        ([QWEN, "--recommend", "--users", "4", "--context", "8k"], 0),
        ([QWEN, "--compare", "t4,l4", "--max-model-len", "32k"], 0),
        (["meta-llama/Llama-3.1-70B-Instruct", "--compare", "t4,l4"], 4),
        ([QWEN, "--gpu", "rtx-4090", "--max-context"], 0),
    ],
)
def test_exit_codes_and_the_whole_object_with_each(kvctl, words: Sequence[str], code: int) -> None:
    assert kvctl(*words).code == code
    result = kvctl(*words, "--json")
    assert result.code == code
    assert next(iter(result.json)) == "schema_version"
    assert set(TOP_LEVEL) <= set(result.json)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tp", "0"], "--tensor-parallel-size is 0"),
        (["--pp", "99"], "exceeds the model's 28 layers"),
        (["--tp", "3"], "does not divide"),
        (["--block-size", "-1"], "--block-size is -1"),
        (["--max-model-len", "0"], "not a number of tokens"),
        (["--max-model-len", "1e99"], ""),
        (["--gpu", "h100", "--gpu-memory-utilization", "1.5"], "1.5"),
        (["--gpu", "h100", "--gpu-memory-utilization", "nan"], "nan"),
        (["--kv-cache-memory-bytes", "-5GiB"], "amount of memory"),
        (["--kv-cache-memory-bytes", "lots"], "amount of memory"),
        (["--engine", "vllm@latest"], "vllm@latest"),
        (["--engine", "zork"], "zork"),
        (["--quantization", "zork"], "zork"),
        (["--gpu", "h100", "--gpu-count", "0"], "--gpu-count is 0"),
        (["--gpu", "h100", "--gpu-count", "4", "--tp", "2"], "--gpu-count 4"),
        (["--users", "3"], "--users"),
        (["--gpu", "h100", "--users", "0", "--context", "1k"], "--users is 0"),
        (["--max-context"], "memory to divide"),
        (["--prefix-share", "1.5", "--gpu", "h100"], "--prefix-share"),
        (["--compare", ","], "names no GPU"),
        (["--gpu", "h100", "--compare-kv", "fp3"], "fp3"),
        (["--gpu", "h100", "--calibrate", "/nothing.log"], "/nothing.log"),
        (["--gpu", "h100", "--workload", "nothing"], "nothing"),
    ],
)
def test_bad_options_are_two_lines_and_exit_two(kvctl, words: Sequence[str], message: str) -> None:
    result = kvctl(QWEN, *words)
    assert result.code == 2
    assert message in result.err
    assert len(result.err.strip().splitlines()) <= 2
    assert "Traceback" not in result.err


@pytest.mark.parametrize(
    ("config", "code", "message"),
    [
        (b"hello", 1, "not JSON"),
        (b"[]", 1, "not an object"),
        (b"{}", 1, "not the config.json"),
        (b'{"model_type":"llama","num_hidden_layers":2,"num_attention_heads":0,"hidden_size":8}', 1, "= 0"),
        (b'{"model_type":"llama","num_hidden_layers":2,"num_attention_heads":3,"hidden_size":8}', 1, "not a multiple"),
        (b'{"model_type":"zork","num_hidden_layers":2,"num_attention_heads":2,"hidden_size":8}', 3, "cannot tell"),
    ],
)
def test_bad_configs_on_stdin_are_one_clear_line(kvctl, config: bytes, code: int, message: str) -> None:
    result = kvctl("-", stdin=config)
    assert result.code == code
    assert message in result.err
    assert "Traceback" not in result.err


def test_a_good_config_on_stdin_is_sized(kvctl) -> None:
    config = b'{"num_hidden_layers":80,"num_attention_heads":64,"num_key_value_heads":8,"head_dim":128}'
    assert kvctl("-", "--json", stdin=config).json["kv"]["bytes_per_token"] == 327_680


@pytest.mark.parametrize(
    "words",
    [
        [QWEN, "--gpu", "h100", "--explain"],
        ["Qwen/Qwen3.5-35B-A3B", "--gpu", "b200", "--engine", "vllm", "--explain"],
        ["deepseek-ai/DeepSeek-R1", "--gpu", "h200", "--tp", "8", "--engine", "vllm"],
        ["meta-llama/Llama-3.1-70B-Instruct", "--gpu", "t4"],
        [QWEN, "--compare", "a100-80g,h100-sxm,l40s", "--compare-kv", "bf16,fp8"],
        [QWEN, "--recommend", "--users", "50", "--context", "8k", "--engine", "vllm"],
        ["google/gemma-3-27b-it", "--gpu", "h100", "--users", "8", "--context", "16k", "--prefix-share", "0.5"],
    ],
)
def test_a_page_is_right_at_80_columns_and_plain_in_ascii(kvctl, words: Sequence[str]) -> None:
    page = kvctl(*words).out
    assert "\x1b[" not in page  # not a terminal: no colours
    assert all(len(line) <= 80 for line in page.splitlines())
    plain = kvctl(*words, "--ascii").out
    assert plain.isascii()


def test_the_verdict_is_the_first_line_and_no_flag_is_broken_over_two(kvctl) -> None:
    page = kvctl("Qwen/Qwen3.6-27B", "--gpu", "rtx-5090", "--engine", "vllm", "-q", "nvfp4").out
    assert page.startswith(("FITS: ", "DOES NOT FIT: "))
    assert "--no-enable-prefix-caching" in page
    assert not [line for line in page.splitlines() if line.endswith("-") and "--" in line]


def test_the_longest_context_says_what_binds(kvctl) -> None:
    """One request of the model's own length fits an H100 many times; an L4 holds less than that."""
    assert kvctl(QWEN, "--gpu", "h100", "--max-context").out.startswith("32,768 tokens, the model's own limit, fit")
    tight = kvctl("meta-llama/Llama-3.1-8B-Instruct", "--gpu", "l4", "--max-context").out
    assert "is the longest context that fits." in tight.splitlines()[0]


def test_the_memory_bar_is_to_scale(kvctl) -> None:
    lines = kvctl("meta-llama/Llama-3.1-8B-Instruct", "--gpu", "a100-40g", "--ascii").out.splitlines()
    bar = next(line for line in lines if line.startswith(" WWW"))
    assert bar.count("W") == pytest.approx(78 * 14.96 / 39.49, abs=1)
    assert len(bar.rstrip()) <= 79


def test_the_recommendation_prints_commands_ready_to_paste(kvctl) -> None:
    page = kvctl("Qwen/Qwen2.5-1.5B-Instruct", "--recommend", "--users", "4", "--context", "4k").out
    assert " kvctl serve Qwen/Qwen2.5-1.5B-Instruct --max-model-len 4000" in page
    assert " vllm serve Qwen/Qwen2.5-1.5B-Instruct --max-model-len 4000" in page


def test_the_page_can_be_saved_as_a_picture(kvctl, tmp_path: Path) -> None:
    assert kvctl(QWEN, "--gpu", "h100", "--svg", str(tmp_path / "page.svg")).code == 0
    assert (tmp_path / "page.svg").read_text().startswith("<svg")
    assert kvctl(QWEN, "--svg", "/nothing/x.svg").code == 2


def test_an_unverified_number_is_marked(kvctl) -> None:
    assert "Unverified in the profile rtx-a6000" in kvctl(QWEN, "--gpu", "rtx-a6000").out


def test_a_calibration_is_learnt_stored_used_and_left_aside(kvctl, tmp_path: Path) -> None:
    log = tmp_path / "vllm.log"
    log.write_text(
        "vllm\nINFO gpu_memory_utilization=0.9 max_model_len=8192\nINFO Available KV cache memory: 50.00 GiB\n"
    )
    words = ["meta-llama/Llama-3.1-8B-Instruct", "--gpu", "h100", "--engine", "vllm@0.11", "--max-model-len", "8192",
             "--gpu-memory-utilization", "0.9"]  # fmt: skip
    before = kvctl(*words, "--json").json["memory"]["kv_bytes"]["value"]
    learnt = kvctl(*words, "--json", "--calibrate", str(log))
    assert learnt.json["memory"]["kv_bytes"]["value"] == pytest.approx(50 * 2**30, rel=1e-6)
    assert any("Calibrated h100-sxm" in note for note in learnt.json["notes"])
    again = kvctl(*words, "--json")
    assert again.json["memory"]["kv_bytes"]["value"] == pytest.approx(50 * 2**30, rel=1e-6)
    assert any(str(log) in note for note in again.json["notes"])
    assert kvctl(*words, "--json", "--uncalibrated").json["memory"]["kv_bytes"]["value"] == before


def test_a_gpu_count_means_tensor_parallel(kvctl) -> None:
    one = kvctl("meta-llama/Llama-3.1-70B-Instruct", "--gpu", "h100", "--gpu-count", "4", "--json").json
    two = kvctl("meta-llama/Llama-3.1-70B-Instruct", "--gpu", "h100", "--tp", "4", "--json").json
    assert one == two
    assert one["kv"]["bytes_per_token_per_gpu"] == 81_920


def test_an_exact_amount_of_kv_memory_needs_no_gpu(kvctl) -> None:
    found = kvctl("Qwen/Qwen3-8B", "--kv-cache-memory-bytes", "5713920000", "--engine", "vllm@0.19.1", "--json").json
    assert found["capacity"]["kv_tokens"] == 38_736
    assert found["memory"]["gpu"] is None
    assert found["memory"]["kv_bytes"] == {"low": 5713920000, "value": 5713920000, "high": 5713920000}


def test_workload_lengths_are_a_question_too(kvctl, tmp_path: Path) -> None:
    profile = tmp_path / "mine.yaml"
    profile.write_text(
        "name: mine\ndescription: d\nsource: s\nclasses:\n"
        "  - {name: a, weight: 1, input_tokens: 1000, output_tokens: 500}\n"
    )
    found = kvctl(QWEN, "--gpu", "h100", "--users", "10", "--workload", str(profile), "--json").json
    assert found["users"]["context_tokens"] == 1500
    assert found["users"]["fits"] is True


def in_a_process(code: str) -> str:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    ).stdout


def test_no_heavy_package_is_imported() -> None:
    code = (
        "import sys; sys.argv = ['kvctl', 'size', 'Qwen/Qwen3-8B', '--gpu', 'h100']\n"
        "from kvctl.cli.app import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'numpy', 'huggingface_hub', 'httpx', 'pandas', 'textual'}\n"
        "print('HEAVY', sorted(heavy & set(sys.modules)))"
    )
    assert in_a_process(code).splitlines()[-1] == "HEAVY []"


def test_peak_memory_is_under_90_mb() -> None:
    code = (
        "import sys; sys.argv = ['kvctl', 'size', 'Qwen/Qwen3-8B', '--gpu', 'h100']\n"
        "from kvctl.cli.app import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print(next(line for line in open('/proc/self/status') if line.startswith('VmHWM')))"
    )
    peak = in_a_process(code).strip().splitlines()[-1]
    assert int(peak.split()[1]) * 1024 < 90_000_000
