"""One load on one engine without HTTP, for scripts/compare_engines.py; prints one line of JSON.

    in_process_load.py kvctl|openvino MODEL CONCURRENCY REQUESTS INPUT OUTPUT KV_GIB

At most CONCURRENCY requests run: as one ends the next begins, a closed loop of that many clients. Imports nothing of
kvctl for openvino, so that it runs in that engine's own environment. Only for openvino, which cannot be asked over
HTTP, the time from a request's beginning to its first token is taken here too.
"""

import json
import random
import resource
import statistics
import sys
import time
from dataclasses import dataclass, field


@dataclass
class Measured:
    """`ttft_s` of each request, where it was taken."""

    ready_s: float
    load_s: float
    num_tokens: int
    ttft_s: list[float] = field(default_factory=list)


def kvctl_load(model: str, concurrency: int, prompts: list[list[int]], output_tokens: int, kv_gib: int) -> Measured:
    """Run with kvctl: all are given at once, `max_num_seqs` holds the others back."""
    from kvctl import LLM, SamplingParams

    started = time.perf_counter()
    llm = LLM(
        model,
        dtype="bfloat16",
        max_model_len=2048,
        max_num_seqs=concurrency,
        kv_cache_memory_bytes=kv_gib << 30,
    )
    params = SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True)
    llm.generate([prompts[0][:8]], params)
    ready = time.perf_counter()
    results = llm.generate(prompts, params)
    load_s = time.perf_counter() - ready
    return Measured(ready - started, load_s, sum(len(result.token_ids) for result in results))


def openvino_load(model: str, concurrency: int, prompts: list[list[int]], output_tokens: int, kv_gib: int) -> Measured:
    """The same with OpenVINO GenAI's continuous batching."""
    import numpy
    import openvino
    import openvino_genai

    started = time.perf_counter()
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = kv_gib
    scheduler.max_num_seqs = concurrency
    scheduler.max_num_batched_tokens = 2048
    scheduler.enable_prefix_caching = False
    pipeline = openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU")

    def run(some: list[list[int]]) -> tuple[int, list[float]]:
        config = openvino_genai.GenerationConfig(max_new_tokens=output_tokens, ignore_eos=True, do_sample=False)
        waiting = list(enumerate(some))
        running: list[tuple[float, bool, openvino_genai.GenerationHandle]] = []  # begun at, has a token
        count, ttft_s = 0, []
        while waiting or running:
            while waiting and len(running) < concurrency:
                index, prompt = waiting.pop(0)
                tokens = openvino.Tensor(numpy.array([prompt], dtype=numpy.int64))
                running.append((time.perf_counter(), False, pipeline.add_request(index, tokens, config)))
            pipeline.step()
            now, going_on = time.perf_counter(), []
            for begun, has_token, handle in running:
                if handle.can_read():
                    count += sum(len(output.generated_ids) for output in handle.read().values())
                    if not has_token:
                        ttft_s.append(now - begun)
                        has_token = True
                if handle.get_status() == openvino_genai.GenerationStatus.RUNNING:
                    going_on.append((begun, has_token, handle))
            running = going_on
        return count, ttft_s

    run([prompts[0][:8]])
    ready = time.perf_counter()
    count, ttft_s = run(prompts)
    return Measured(ready - started, time.perf_counter() - ready, count, ttft_s)


def main() -> None:
    """Build the same prompts for either engine and run."""
    engine, model = sys.argv[1:3]
    concurrency, num_requests, input_tokens, output_tokens, kv_gib = map(int, sys.argv[3:])
    rng = random.Random(0)
    prompts = [[rng.randrange(1000, 20_000) for _ in range(input_tokens)] for _ in range(num_requests)]
    load = {"kvctl": kvctl_load, "openvino": openvino_load}[engine]
    measured = load(model, concurrency, prompts, output_tokens, kv_gib)
    expected = num_requests * output_tokens
    if measured.num_tokens != expected:
        sys.exit(f"{measured.num_tokens} tokens came, not {expected}")
    peaks = [resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    print(
        json.dumps(
            {
                "ready_s": measured.ready_s,
                "output_tokens_per_s": measured.num_tokens / measured.load_s,
                "ttft_p50_ms": statistics.median(measured.ttft_s) * 1000 if measured.ttft_s else None,
                "rss_bytes": max(peaks) * 1024,
            }
        )
    )


if __name__ == "__main__":
    main()
