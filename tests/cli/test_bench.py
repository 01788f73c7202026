"""`kvctl bench` as a user runs it: a process, a real server in another, files and exit codes."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from kvctl.bench.mock_process import start_mock_process
from kvctl.bench.mock_script import MockScript

QUICK = ("--no-calibrate", "--no-metrics", "-c", "2", "-n", "6", "--input-tokens", "20", "--output-tokens", "8")
WATCHED = tuple(word for word in QUICK if word != "--no-metrics")


def kvctl(*arguments, timeout=60, env=None):
    command = [sys.executable, "-m", "kvctl", "bench", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, env={**os.environ, "COLUMNS": "80", **(env or {})}
    )


@pytest.fixture(scope="module")
def server():
    with start_mock_process(MockScript(ttft_s=0.02, gap_s=0.002, tokens=8)) as url:
        yield url


def test_a_run_prints_tables_and_writes_every_file(server, tmp_path):
    files = [tmp_path / name for name in ("r.json", "r.csv", "r.html")]
    done = kvctl(server, *WATCHED, "--json", files[0], "--csv", files[1], "--html", files[2], "--records")
    assert done.returncode == 0, done.stderr
    assert "6 ok, 0 failed" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    result = json.loads(files[0].read_text())
    assert result["schema_version"] == 1
    assert len(result["records"]) == 6
    assert result["summary"]["input_tokens"]["exact_share"] == 1.0
    assert result["server"]["kind"] == "vLLM"
    assert files[1].read_text().count("\n") == 2
    assert files[2].read_text().startswith("<!doctype html>")


def test_json_on_stdout_is_nothing_but_json(server):
    done = kvctl(server, *QUICK, "--json", "-")
    assert json.loads(done.stdout)["summary"]["completed"] == 6


def test_vllms_names_are_written_on_demand(server):
    done = kvctl(server, *QUICK, "--json", "-", "--format", "vllm")
    assert json.loads(done.stdout)["mean_ttft_ms"] > 19


def test_an_open_loop_with_an_slo_and_a_workload_runs(server):
    done = kvctl(
        server,
        "--no-calibrate",
        "--no-metrics",
        "-r",
        "40",
        "-n",
        "12",
        "-w",
        "chat",
        "--slo",
        "ttft=5s",
        "--endpoint",
        "chat",
        "--json",
        "-",
    )
    result = json.loads(done.stdout)
    assert result["summary"]["goodput"]["share"] == 1.0
    assert result["config"]["load"]["arrivals"]["process"] == "poisson"


def test_a_sweep_gives_one_table(server, tmp_path):
    page = tmp_path / "s.html"
    done = kvctl(
        server,
        "--sweep",
        "concurrency=1,2",
        "-n",
        "4",
        "--no-calibrate",
        "--no-metrics",
        "--input-tokens",
        "9",
        "--html",
        page,
    )
    assert done.returncode == 0, done.stderr
    assert "at once" in done.stdout
    assert "sweep over concurrency" in page.read_text()


def test_a_result_compared_with_itself_is_no_regression_and_a_slower_one_is(server, tmp_path):
    first, slow = tmp_path / "a.json", tmp_path / "b.json"
    kvctl(server, *QUICK, "-q", "--json", first)
    assert kvctl("compare", first, first, "--fail-if", "ttft_p50>+10%").returncode == 0
    with start_mock_process(MockScript(ttft_s=0.2, gap_s=0.002, tokens=8)) as url:
        kvctl(url, *QUICK, "-q", "--json", slow)
    done = kvctl("compare", first, slow, "--fail-if", "ttft_p50>+10%")
    assert done.returncode == 5
    assert "FAILED" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (("http://127.0.0.1:9",), 1, "nothing answers"),
        (("ftp://x",), 2, "not a server's address"),
        (("-c", "2", "-r", "3"), 2, "two different loads"),
        (("--workload", "nope"), 2, "no workload"),
        (("--dataset", "/nonexistent.jsonl"), 2, "cannot read"),
        (("--find", "max-rate"), 2, "needs an SLO"),
        (("--sweep", "x=1"), 2, "is no sweep"),
        (("--json", "/nonexistent/x.json"), 2, "cannot write"),
        (("--format", "xml"), 2, "unknown format"),
        (("--api-key",), 2, "finds no key"),
        (("compare", "/nonexistent", "/nonexistent"), 2, "cannot read"),
        (("mock", "--fault", "fire"), 2, "unknown fault"),
        (("--no-such-option",), 2, "No such option"),
    ],
)
def test_mistakes_are_told_in_two_lines_with_their_exit_code(arguments, code, told):
    names = ("KVCTL_API_KEY", "VLLM_API_KEY", "OPENAI_API_KEY")
    done = kvctl(*arguments, env=dict.fromkeys(names, ""))
    assert done.returncode == code
    assert told in done.stderr
    assert "Traceback" not in done.stderr


def test_too_many_errors_end_with_5_and_the_result_is_written(tmp_path):
    path = tmp_path / "r.json"
    with start_mock_process(
        MockScript(fault="503", fault_share=0.7, seed=5, retry_after_s=0.01, ttft_s=0.01, tokens=2)
    ) as url:
        for _ in range(12):  # the test requests before the run may meet the fault too
            done = kvctl(
                url, "--no-calibrate", "--no-metrics", "-c", "8", "-n", "200", "--json", path, "--input-tokens", "9"
            )
            if done.returncode == 5:
                break
    assert done.returncode == 5
    result = json.loads(path.read_text())
    assert result["stopped_by_errors"]
    assert result["errors"]["http_503"]["count"] >= 10


def test_ctrl_c_keeps_what_was_measured_and_marks_it(tmp_path):
    path = tmp_path / "r.json"
    with start_mock_process(MockScript(ttft_s=0.02, gap_s=0.002, tokens=8)) as url:
        command = [
            sys.executable,
            "-m",
            "kvctl",
            "bench",
            url,
            "--no-calibrate",
            "-c",
            "2",
            "-d",
            "60s",
            "--json",
            str(path),
        ]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        import httpx

        while len(httpx.get(f"{url}/mock/log", trust_env=False).json()["streams"]) < 20:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    result = json.loads(path.read_text())
    assert result["interrupted"]
    assert result["errors"] == {}
    assert 1 <= result["summary"]["unfinished"] <= 2
    assert result["summary"]["completed"] >= 10
    assert "interrupted" in out
    assert "Traceback" not in err


def test_ctrl_c_during_the_self_calibration_ends_the_command(server):
    """It ends everything, not the calibration alone; the line on stderr says that the calibration has begun."""
    command = [sys.executable, "-u", "-m", "kvctl", "bench", server, "-c", "2", "-d", "60s"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while "calibrating" not in (process.stderr.readline() or "calibrating"):
        pass
    time.sleep(1.2)  # into its load, which takes a second after a scripted server has started
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert "TTFT" not in out


def test_a_load_that_only_prepares_the_measured_one_hands_ctrl_c_on(monkeypatch):
    from kvctl.bench import load_process
    from kvctl.bench.collector import Measurements

    interrupted = Measurements()
    interrupted.interrupted = True
    monkeypatch.setattr(load_process, "run_load", lambda job, num_workers: interrupted)
    with pytest.raises(KeyboardInterrupt):
        load_process.run_aside(None)


def test_a_server_that_dies_in_mid_run_leaves_a_result(tmp_path):
    path = tmp_path / "r.json"
    import httpx

    with start_mock_process(MockScript(ttft_s=0.02, gap_s=0.002, tokens=8)) as url:
        command = [
            sys.executable,
            "-m",
            "kvctl",
            "bench",
            url,
            "--no-calibrate",
            "-c",
            "4",
            "-d",
            "60s",
            "--json",
            str(path),
        ]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        while len(httpx.get(f"{url}/mock/log", trust_env=False).json()["streams"]) < 20:
            time.sleep(0.05)
    _, err = process.communicate(timeout=60)
    result = json.loads(path.read_text())
    assert process.returncode == 5, err
    assert result["stopped_by_errors"]
    assert result["errors"]["connect"]["count"] > 0


def test_the_mock_command_serves_and_ends_on_ctrl_c():
    import httpx

    command = [sys.executable, "-m", "kvctl", "bench", "mock", "--port", "0", "--tokens", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    url = process.stdout.readline().strip()
    answer = httpx.post(f"{url}/v1/completions", json={"prompt": "a", "max_tokens": 3}, trust_env=False)
    assert answer.json()["usage"]["completion_tokens"] == 3
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=10) == 0
    process.stdout.close()


def test_help_names_every_panel_and_imports_no_load_path():
    code = (
        "import sys; from kvctl.cli.app import build_app; from typer.testing import CliRunner; "
        "r = CliRunner().invoke(build_app(['bench']), ['bench', '--help']); print(r.output); "
        "print([m for m in ('torch', 'numpy', 'httpx', 'uvloop', 'kvctl.bench.runner') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    for word in ("Load", "Workload", "SLO and search", "Output", "compare", "mock"):
        assert word in done.stdout
    assert done.stdout.strip().endswith("[]")
