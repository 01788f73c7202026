"""Predict `kvctl serve` on this machine's CPU, measure it, and print both with the error.

Starts `kvctl serve` with the demo model (or --model), sends bursts of 1, 4, 16 and 64 requests and compares mean
TTFT and TPOT with the roofline of the `cpu` profile (scripts/measure_cpu_profile.py). Needs the [serve] extra.

    python scripts/size_vs_serve.py [--model FOLDER] [--prompt 128] [--output 32] [--measure-profile]
"""

import argparse
import asyncio
import json
import random
import socket
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import httpx

from kvctl.engine.model_source import resolve_model
from kvctl.model.hardware import find_hardware
from kvctl.model.weight_size import Parallelism
from kvctl.server.engine_config import CPU_BATCHED_TOKENS
from kvctl.sizing.request import SizeRequest, size_up
from kvctl.sizing.sized_model import load_model
from kvctl.sizing.speed import Band, SpeedModel

BATCHES = (1, 4, 16, 64)
READY_S = 180.0
ROUNDS = 3


@dataclass(frozen=True)
class Measured:
    """One request: time to its first token, and per token after it."""

    ttft_s: float
    tpot_s: float


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def one_request(client: httpx.AsyncClient, url: str, model: str, prompt: list[int], output: int) -> Measured:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": output,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    started = time.perf_counter()
    arrivals: list[float] = []
    async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {") and json.loads(line[6:]).get("choices"):
                arrivals.append(time.perf_counter())  # noqa: PERF401 - the moment counts, not the list
    return Measured(arrivals[0] - started, (arrivals[-1] - arrivals[0]) / max(1, output - 1))


async def burst(url: str, model: str, size: int, prompt: int, output: int, rng: random.Random) -> list[Measured]:
    limits = httpx.Limits(max_connections=size + 1)
    async with httpx.AsyncClient(timeout=600, limits=limits) as client:
        prompts = [[rng.randrange(1000, 20_000) for _ in range(prompt)] for _ in range(size)]  # no shared prefix
        return list(await asyncio.gather(*(one_request(client, url, model, p, output) for p in prompts)))


async def wait_ready(url: str, server: subprocess.Popen[bytes]) -> str:
    deadline = time.monotonic() + READY_S
    async with httpx.AsyncClient(timeout=5) as client:
        while time.monotonic() < deadline:
            if server.poll() is not None:
                raise SystemExit(f"kvctl serve ended with code {server.returncode}")
            try:
                answer = await client.get(f"{url}/v1/models")
                return str(answer.json()["data"][0]["id"])
            except (httpx.HTTPError, KeyError):
                await asyncio.sleep(0.3)
    raise SystemExit("kvctl serve did not become ready")


def row(name: str, size: int, predicted: Band, measured_s: float) -> str:
    error = predicted.value / measured_s - 1
    inside = "yes" if predicted.low <= measured_s <= predicted.high else "no"
    return (
        f"| {name} | {size} | {predicted.value * 1e3:.1f} ({predicted.low * 1e3:.1f}..{predicted.high * 1e3:.1f}) "
        f"| {measured_s * 1e3:.1f} | {error:+.0%} | {inside} |"
    )


async def compare(url: str, server: subprocess.Popen[bytes], speed: SpeedModel, prompt: int, output: int) -> None:
    model = await wait_ready(url, server)
    rng = random.Random(0)
    await burst(url, model, 2, prompt, output, rng)  # warm
    print(f"prompt {prompt} tokens, output {output} tokens, best of {ROUNDS} bursts\n")
    print("| number | requests | predicted ms (range) | measured ms | error | inside |")
    print("|---|---:|---|---:|---:|---|")
    errors = []
    for size in BATCHES:
        rounds = [await burst(url, model, size, prompt, output, rng) for _ in range(ROUNDS)]
        ttft_s = min(statistics.mean(m.ttft_s for m in r) for r in rounds)
        tpot_s = min(statistics.mean(m.tpot_s for m in r) for r in rounds)
        ttft, tpot = speed.burst(size, prompt, output, CPU_BATCHED_TOKENS)
        print(row("TTFT", size, ttft, ttft_s))
        print(row("TPOT", size, tpot, tpot_s))
        errors += [abs(ttft.value / ttft_s - 1), abs(tpot.value / tpot_s - 1)]
    print(f"\nmean absolute error {statistics.mean(errors):.0%}, worst {max(errors):.0%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default=None, help="folder of a servable model; the demo model if left out")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--output", type=int, default=32)
    parser.add_argument("--measure-profile", action="store_true", help="measure the cpu profile first")
    options = parser.parse_args()
    if options.measure_profile:
        script = Path(__file__).parent / "measure_cpu_profile.py"
        subprocess.run([sys.executable, str(script)], check=True, stdout=subprocess.DEVNULL)
    source = resolve_model(options.model, progress=lambda *_: None)
    hardware = find_hardware("cpu")
    request = SizeRequest(model=load_model(str(source.folder)), hardware=hardware, engine="kvctl")
    answer = size_up(request)
    if answer.weights is None:
        raise SystemExit("the weights of this model are not known")
    speed = SpeedModel(request.model.shape, answer.specs, answer.weights, hardware, Parallelism(), answer.dtype)
    port = free_port()
    command = [sys.executable, "-m", "kvctl", "serve", str(source.folder), "--port", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        asyncio.run(compare(f"http://127.0.0.1:{port}", server, speed, options.prompt, options.output))
    finally:
        server.terminate()
        server.wait(timeout=30)


if __name__ == "__main__":
    main()
