"""scripts/compare_engines.py: its bound against figures worked out by hand, and what it writes."""

import importlib.util
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent.parent / "scripts"


@pytest.fixture(scope="module")
def compare():
    sys.path.insert(0, str(SCRIPTS))
    try:
        spec = importlib.util.spec_from_file_location("compare_engines", SCRIPTS / "compare_engines.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules["compare_engines"] = module
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path.remove(str(SCRIPTS))
        del sys.modules["compare_engines"]


@pytest.fixture
def work(compare):
    """SmolLM2-135M in bfloat16: 134.5 M parameters, 28.3 M of them the tied embedding, 23,040 bytes of KV a token."""
    return compare.Work(269_030_016, 106_203_456, 28_311_552, 23_040)


@pytest.mark.parametrize(
    ("load", "expected"),
    [
        # read 269 MB in 3.49 ms and 320 tokens of KV in 0.10 ms, 128 times; 54.4 GFLOP of prompt in 62.6 ms
        ("1 request", 128 / (0.0626 + 128 * 0.00359)),
        # 17.2 GFLOP in 19.8 ms and 472 MB of KV in 6.1 ms a step; each request has a 64th of it
        ("64", 128 / (0.0626 + 128 * 0.0259 / 64)),
        # half the prompt and 192 tokens of KV
        ("64 at once, 128/128", 128 / (0.0313 + 128 * 0.0235 / 64)),
    ],
)
def test_the_bound_is_what_memory_and_arithmetic_allow(compare, work, load, expected):
    machine = compare.Machine(77e9, 870e9)
    chosen = next(each for each in compare.LOADS if each.name == load)
    assert work.bound(chosen, machine) == pytest.approx(expected, rel=0.01)


def test_the_report_has_ratios_against_the_best_peer_and_names_what_did_not_run(compare, work):
    load = compare.QUICK_LOADS[0]
    results = [
        compare.Result(
            "kvctl",
            2.5,
            3 * 10**9,
            {load.name: [90.0, 120.0, 100.0]},
            {load.name: [30.0, 50.0, 40.0]},
            {load.name: [7.0, 7.0, 8.0]},
        ),
        compare.Result("vLLM", 60.0, 3 * 10**9, {load.name: [50.0]}, {load.name: [80.0]}),
        compare.Result("OpenVINO GenAI, in process", 1.0, 10**9, {load.name: [80.0]}),
    ]
    machine = compare.Machine(77e9, 870e9)
    text = compare.report(results, {"llama.cpp": "there is no /x"}, (load,), work, machine, 3, (100.0, 850.0))
    share = 100.0 / work.bound(load, machine)
    assert f"| kvctl | 100 (90 to 120), {share:.0%} | 2.5 | 3.00 |" in text
    assert "| kvctl, output tokens/s | 1.25x |" in text
    assert "| kvctl | 40 |" in text
    assert "| kvctl, time to first token | 0.50x |" in text
    # 64 tokens through 106 M parameters, one through the output matrix: 13.65 GFLOP at 870; 269 MB at 77 GB/s
    assert "first token after 40 ms, 2.55 times what its products take at the machine's rate (16 ms)" in text
    assert "7.0 ms a token, 2.00 times what reading the weights takes (3.5 ms)" in text
    assert "all processes: 0.85 GB" in text
    assert "100 ms with prefix caching, 850 ms without: 8.5x" in text
    assert "Not run: llama.cpp (there is no /x)." in text


def test_the_readme_gets_one_results_section_however_often_it_is_written(compare, monkeypatch, tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text("# x\n\n## Bench\n\ntext\n\n## Security\n\nmore\n")
    monkeypatch.setattr(compare, "README", readme)
    compare.write_readme("first")
    compare.write_readme("second \\1")
    text = readme.read_text()
    assert text.count("## Beside other CPU engines") == 1
    assert "first" not in text and "second \\1" in text
    assert text.index("text") < text.index("second") < text.index("## Security")


def test_a_peer_that_is_not_there_says_what_is_missing(compare, monkeypatch, tmp_path):
    monkeypatch.setenv("KVCTL_PEER_VLLM", str(tmp_path / "nowhere"))
    engines = {engine.name: engine for engine in compare.known_engines(tmp_path)}
    assert engines["vLLM"].missing == tmp_path / "nowhere" / "bin" / "vllm"
    assert engines["kvctl"].missing is None
