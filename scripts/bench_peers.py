"""Part `peers` of `bench_accuracy.py`: other load generators beside ours, on one scripted server, in one run.

Each client runs the same load (closed loop, chat, 32 tokens in, 32 out) with its own default settings; what it reports
stands beside the server's log of that very run. Each has a virtual environment of its own:

    KVCTL_PEER_VLLM        its folder, default ~/.cache/kvctl/peers/vllm (any vLLM whose `vllm bench serve` works)
    KVCTL_PEER_GUIDELLM    the same, default ~/.cache/kvctl/bench-peers/guidellm (--install-peers makes it)
    KVCTL_PEER_AIPERF      the same, default ~/.cache/kvctl/bench-peers/aiperf   (--install-peers makes it)

A peer that is not there is named as skipped. vLLM is never installed: its package brings an engine of gigabytes.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from bench_rig import (
    LENGTHS,
    SCRIPT_GAP_MS,
    SCRIPT_TOKENS,
    SCRIPT_TTFT_MS,
    bench_command,
    or_dash,
    requests_for,
    truth,
)

from kvctl.bench.mock_process import start_mock_process
from kvctl.bench.mock_script import MockScript
from kvctl.metrics.summary import percentile

CACHE = Path.home() / ".cache" / "kvctl"
DEFAULT_TOKENIZER = CACHE / "models" / "SmolLM2-135M-Instruct"
_HUB_NAME, _REVISION = "kvctl/demo", "0" * 39 + "1"
_LEAST_GAP_MS = 5.0  # a p50 below half of the script's gap is an artefact of events read together


@dataclass(frozen=True)
class Figures:
    """What a client reports, in ms. `gap_kind`: what its gap is."""

    ttft_p50: float | None
    ttft_p99: float | None
    gap_p50: float | None
    gap_p99: float | None
    gap_kind: str


@dataclass(frozen=True)
class Load:
    """One run that a peer is to make."""

    url: str
    concurrency: int
    tokenizer: Path
    folder: Path  # where results go

    @property
    def requests(self) -> int:
        """How many requests."""
        return requests_for(self.concurrency)


@dataclass(frozen=True)
class Peer:
    """A load generator: where it is, how it is called, how its result is read."""

    name: str
    variable: str
    default: Path
    command: Callable[[str, Load], list[str]]
    figures: Callable[[Path], Figures]
    package: str | None  # None: not installed from here
    good_codes: tuple[int, ...] = (0,)

    @property
    def folder(self) -> Path:
        """Its virtual environment."""
        return Path(os.environ.get(self.variable) or self.default)

    @property
    def program(self) -> Path:
        """Its command."""
        return self.folder / "bin" / self.name


def _ours_command(program: str, load: Load) -> list[str]:
    load_options = ("-c", str(load.concurrency), "-n", str(load.requests), "--endpoint", "chat", *LENGTHS)
    return bench_command(load.url, *load_options, result=str(load.folder / "ours.json"))


def _ours_figures(folder: Path) -> Figures:
    summary = json.loads((folder / "ours.json").read_text())["summary"]
    ttft, gap = summary["ttft_ms"], summary["gap_ms"]
    return Figures(ttft["p50"], ttft["p99"], gap["p50"], gap["p99"], "between events")


def _vllm_command(program: str, load: Load) -> list[str]:
    lengths = ["--random-input-len", "32", "--random-output-len", str(SCRIPT_TOKENS)]
    where = ["--base-url", load.url, "--endpoint", "/v1/chat/completions", "--model", "mock"]
    result = ["--save-result", "--result-dir", str(load.folder), "--result-filename", "vllm.json"]
    size = ["--num-prompts", str(load.requests), "--max-concurrency", str(load.concurrency)]
    data = ["--tokenizer", str(load.tokenizer), "--dataset-name", "random"]
    return [program, "bench", "serve", "--backend", "openai-chat", *where, *data, *lengths, *size, *result]


def _vllm_figures(folder: Path) -> Figures:
    value = json.loads((folder / "vllm.json").read_text())
    ttft, gap = value["median_ttft_ms"], value["median_itl_ms"]
    return Figures(ttft, value.get("p99_ttft_ms"), gap, value.get("p99_itl_ms"), "between events")


def _guidellm_command(program: str, load: Load) -> list[str]:
    options = {
        "backend": f"kind=openai_http,target={load.url}/v1,model=mock",
        "profile": f"kind=concurrent,streams={load.concurrency}",
        "constraint": f"kind=max_requests,count={load.requests}",
        "tokenizer": f"kind=huggingface_auto,model={load.tokenizer}",
        "data": f"kind=synthetic_text,prompt_tokens=32,output_tokens={SCRIPT_TOKENS}",
        "output": f"kind=json,path={load.folder / 'guidellm.json'}",
    }
    return [program, "run", *(word for name, value in options.items() for word in (f"--{name}", value)),
            "--disable-console"]  # fmt: skip


def _guidellm_figures(folder: Path) -> Figures:
    metrics = json.loads((folder / "guidellm.json").read_text())["benchmarks"][0]["metrics"]

    def of(name: str) -> tuple[float, float]:
        found = metrics[name]["successful"]
        return found["median"], found["percentiles"]["p99"]

    return Figures(*of("time_to_first_token_ms"), *of("inter_token_latency_ms"), "mean of a request")


def _aiperf_command(program: str, load: Load) -> list[str]:
    where = ["--model", "mock", "--url", load.url, "--endpoint-type", "chat", "--streaming"]
    size = ["--concurrency", str(load.concurrency), "--request-count", str(load.requests)]
    data = ["--tokenizer", _HUB_NAME, "--isl", "32", "--osl", str(SCRIPT_TOKENS)]
    return [program, "profile", *where, *size, *data, "--ui", "none", "--output-artifact-dir", str(load.folder)]


def _aiperf_figures(folder: Path) -> Figures:
    value = json.loads(next(folder.rglob("profile_export_aiperf.json")).read_text())
    ttft, gap = value["time_to_first_token"], value["inter_chunk_latency"]
    return Figures(ttft["p50"], ttft["p99"], gap["p50"], gap["p99"], "between events")


OURS = Peer("kvctl", "", Path(), _ours_command, _ours_figures, None, (0, 6))  # 6: it says itself that it was the limit
PEERS = (
    Peer("vllm", "KVCTL_PEER_VLLM", CACHE / "peers" / "vllm", _vllm_command, _vllm_figures, None),
    Peer("guidellm", "KVCTL_PEER_GUIDELLM", CACHE / "bench-peers" / "guidellm", _guidellm_command,
         _guidellm_figures, "guidellm"),
    Peer("aiperf", "KVCTL_PEER_AIPERF", CACHE / "bench-peers" / "aiperf", _aiperf_command, _aiperf_figures, "aiperf"),
)  # fmt: skip


def _offline_hub(folder: Path, tokenizer: Path) -> Path:
    """A hub cache that holds the tokenizer under a name: AIPerf takes no folder while it is offline."""
    model = folder / f"models--{_HUB_NAME.replace('/', '--')}"
    snapshot = model / "snapshots" / _REVISION
    snapshot.mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(_REVISION)
    for file in (*tokenizer.glob("tokenizer*"), *tokenizer.glob("*config.json")):
        if file.name not in {copied.name for copied in snapshot.iterdir()}:
            shutil.copy(file, snapshot)
    return folder


def _environment(hub: Path) -> Mapping[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OPENBLAS_")}
    return kept | {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(hub), "OPENAI_API_KEY": "none"}


def _run(peer: Peer, load: Load, environment: Mapping[str, str]) -> tuple[str | None, float]:
    """Run it; returns (what went wrong, CPU seconds of it and its children)."""
    before = os.times()
    with (load.folder / "said.txt").open("w+", encoding="utf-8") as said:
        try:
            done = subprocess.run(
                peer.command(str(peer.program), load), stdout=said, stderr=subprocess.STDOUT, timeout=600,
                env=dict(environment), cwd=load.folder,
            )  # fmt: skip
            problem = f"exit code {done.returncode}" if done.returncode not in peer.good_codes else None
        except (OSError, subprocess.TimeoutExpired) as error:
            problem = str(error)
        said.seek(0)
        text = said.read()
    after = os.times()
    cpu_s = after.children_user + after.children_system - before.children_user - before.children_system
    return problem and f"{problem}: {' '.join(text.split())[-200:]}", cpu_s


def measure_peers(concurrency: int, tokenizer: Path, repeats: int) -> bool:
    """Print what each client reports beside the server's log; False where an installed one could not be run."""
    versions = ", ".join(f"{name} {version}" for name, version in peer_versions().items())
    print(
        f"\nclients side by side ({versions or 'no other one installed'}): {concurrency} streams, "
        f"{requests_for(concurrency)} requests of {SCRIPT_TOKENS} tokens,\nchat without a role delta; reported / by "
        "the server's log (ms); errors are shares of the script's 50 and 10 ms"
    )
    columns = (("client", -9), ("run", 4), ("TTFT p50", 16), ("error", 8), ("p99", 15), ("gap p50", 14), ("error", 8),
               ("p99", 15), ("in flight", 10), ("CPU s", 7))  # fmt: skip
    print("  " + "".join(f"{name:<{-w}}" if w < 0 else f"{name:>{w}}" for name, w in columns) + "  its gap")
    errors: dict[str, list[float]] = {}
    all_ran = True
    with tempfile.TemporaryDirectory() as folder:
        environment = _environment(_offline_hub(Path(folder) / "hub", tokenizer))
        for run in range(repeats):
            for peer in (OURS, *PEERS):
                if peer is not OURS and not peer.program.exists():
                    if run == 0:
                        print(f"  {peer.name:<9} skipped: no {peer.program} (see {peer.variable})")
                    continue
                out = Path(folder) / f"{peer.name}-{run}"
                out.mkdir()
                with start_mock_process(MockScript(role_delta=False)) as url:
                    problem, cpu_s = _run(peer, Load(url, concurrency, tokenizer, out), environment)
                    ttfts, gaps, most = truth(url)
                if problem is not None or not gaps:
                    print(f"  {peer.name:<9} failed: {problem or 'nothing reached the server'}", flush=True)
                    all_ran = False
                    continue
                row, error = _row(peer.figures(out), ttfts, gaps)
                errors.setdefault(peer.name, []).append(error)
                cells = (peer.name, str(run + 1), *row[:-1], str(most), f"{cpu_s:.1f}")
                told = "".join(f"{c:<{-w}}" if w < 0 else f"{c:>{w}}" for c, (_, w) in zip(cells, columns, strict=True))
                print(f"  {told}  {row[-1]}", flush=True)
    if len(errors) > 1:
        told = ", ".join(f"{name} {statistics.median(found):+.1%}" for name, found in errors.items())
        print(f"  TTFT p50 against the log, median of the runs: {told}")
    return all_ran


def _row(figures: Figures, ttfts: list[float], gaps: list[float]) -> tuple[list[str], float]:
    ttft_log, gap_log = percentile(ttfts, 50) * 1e3, percentile(gaps, 50) * 1e3
    ttft_error = ((figures.ttft_p50 or 0.0) - ttft_log) / SCRIPT_TTFT_MS
    gap_error = ((figures.gap_p50 or 0.0) - gap_log) / SCRIPT_GAP_MS
    kind = figures.gap_kind
    if kind == "between events" and (figures.gap_p50 or 0.0) < _LEAST_GAP_MS:
        kind += ": events it read together"
    row = [
        f"{or_dash(figures.ttft_p50)} / {ttft_log:.1f}", f"{ttft_error:+.1%}",
        f"{or_dash(figures.ttft_p99)} / {percentile(ttfts, 99) * 1e3:.1f}",
        f"{or_dash(figures.gap_p50)} / {gap_log:.1f}", f"{gap_error:+.1%}",
        f"{or_dash(figures.gap_p99)} / {percentile(gaps, 99) * 1e3:.1f}", kind,
    ]  # fmt: skip
    return row, ttft_error


def install_peers() -> None:
    """Make an environment for each peer that can be installed and is missing; torch stays what this one has."""
    constraint = []
    try:
        constraint = [f"torch=={metadata.version('torch').partition('+')[0]}"]
    except metadata.PackageNotFoundError:
        print("no torch here: GuideLLM brings whatever torch the index has, perhaps one of gigabytes")
    for peer in PEERS:
        if peer.package is None or peer.program.exists():
            continue
        subprocess.run([sys.executable, "-m", "venv", str(peer.folder)], check=True)
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
            file.write("\n".join(constraint))
            file.flush()
            subprocess.run([peer.folder / "bin" / "pip", "install", "-q", "-c", file.name, peer.package], check=False)


def peer_versions() -> dict[str, str]:
    """The version of each peer that is there."""
    found = {}
    for peer in PEERS:
        names = [path.name for path in peer.folder.glob(f"lib/python*/site-packages/{peer.name}-*.dist-info")]
        if names:
            found[peer.name] = names[0].removesuffix(".dist-info").partition("-")[2]
    return found
