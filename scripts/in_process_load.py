"""One load on one engine without HTTP, for scripts/compare_engines.py; prints one line of JSON.

    in_process_load.py kvctl|openvino MODEL CONCURRENCY REQUESTS INPUT OUTPUT KV_GIB

All requests are given at once and at most CONCURRENCY run: as one ends the next begins, like a closed loop of that
many clients. Imports nothing of kvctl for openvino, so that it runs in that engine's own environment.
"""

import json
import random
import resource
import sys
import time


def kvctl_load(
    model: str, concurrency: int, prompts: list[list[int]], output_tokens: int, kv_gib: int
) -> tuple[float, float, int]:
    """Run with kvctl; returns (seconds to ready, seconds of the load, output tokens)."""
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
    return ready - started, time.perf_counter() - ready, sum(len(result.token_ids) for result in results)


def openvino_load(
    model: str, concurrency: int, prompts: list[list[int]], output_tokens: int, kv_gib: int
) -> tuple[float, float, int]:
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

    def run(some: list[list[int]]) -> int:
        config = openvino_genai.GenerationConfig(max_new_tokens=output_tokens, ignore_eos=True, do_sample=False)
        handles = [
            pipeline.add_request(index, openvino.Tensor(numpy.array([prompt], dtype=numpy.int64)), config)
            for index, prompt in enumerate(some)
        ]
        while pipeline.has_non_finished_requests():
            pipeline.step()
        return sum(len(output.generated_ids) for handle in handles for output in handle.read_all())

    run([prompts[0][:8]])
    ready = time.perf_counter()
    count = run(prompts)
    return ready - started, time.perf_counter() - ready, count


def main() -> None:
    """Build the same prompts for either engine and run."""
    engine, model = sys.argv[1:3]
    concurrency, num_requests, input_tokens, output_tokens, kv_gib = map(int, sys.argv[3:])
    rng = random.Random(0)
    prompts = [[rng.randrange(1000, 20_000) for _ in range(input_tokens)] for _ in range(num_requests)]
    load = {"kvctl": kvctl_load, "openvino": openvino_load}[engine]
    ready_s, load_s, count = load(model, concurrency, prompts, output_tokens, kv_gib)
    expected = num_requests * output_tokens
    if count != expected:
        sys.exit(f"{count} tokens came, not {expected}")
    peaks = [resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    print(json.dumps({"ready_s": ready_s, "output_tokens_per_s": count / load_s, "rss_bytes": max(peaks) * 1024}))


if __name__ == "__main__":
    main()
