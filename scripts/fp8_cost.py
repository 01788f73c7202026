#!/usr/bin/env python3
"""What a float8 KV cache costs a real model: perplexity and greedy agreement on a fixed text, against bfloat16.

    scripts/fp8_cost.py [--model NAME] [--json]     the demo model if no other is named; runs on this machine's CPU

Agreement: the share of the text's positions at which the most likely next token is the same as with a bfloat16 cache.
"""

import argparse
import json
import math
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import get_args

from kvctl.core.config import SchedulerConfig
from kvctl.core.request import Request
from kvctl.core.sampling_params import SamplingParams
from kvctl.engine.build import build_engine_core
from kvctl.engine.config import DeviceConfig, EngineConfig, KVCacheDtype, ModelConfig
from kvctl.engine.model_source import resolve_model
from kvctl.engine.tokenizer import Tokenizer

TEXT = """\
The lighthouse stood at the end of a stone pier that the winter storms had broken twice. Every evening the keeper, a
quiet man named Anton, carried a can of oil up one hundred and twelve steps, trimmed the wick, and wrote the weather
into a book with a green cover. He had done so for thirty years, and the book was the ninth of its kind. When the
harbour master asked him why he still wrote by hand, he said that the sea did not change its mind because somebody
owned a computer.

In the spring a young engineer came from the city to measure the light. She brought instruments in padded boxes, a
laptop, and a letter from the ministry which said that the lamp would be replaced by a machine that needed no keeper.
Anton read the letter, folded it, and put it between two pages of the green book. Then he showed her the stairs, the
lens, and the place where the swallows nested. "You will need a number for all of this," he said. "The distance is
twenty-one nautical miles in clear air. In fog it is whatever the fog decides."

She stayed for a week. On the first day she counted the flashes and found that they were three seconds apart, to within
a tenth. On the second day she measured the brightness and found it lower than the tables promised, because the glass
was old. On the third day there was fog, and she could measure nothing at all, so she sat in the kitchen and read the
book with the green cover. It began with the wind and ended with the ships: their names, their ports, the hour at which
they passed, and, now and then, a single word such as late, or lame, or lucky.

The new lamp works like this. A small motor turns a ring of lenses around a lamp that never goes out. A sensor looks at
the sky, and when the light of the day falls below a threshold, a relay closes and current flows. If the lamp fails, a
second lamp swings into its place within two seconds, and a message is sent to the office in the city. The cost of the
whole is 48,000 for the machine and 1,200 a year for the power; the keeper had cost 31,500 a year. By that reckoning
the machine pays for itself in less than two years, which is what the letter said.

But the report that the engineer wrote was longer than the letter. It had a table with the brightness, a drawing of the
lens, and a list of 214 ships which had changed their course in bad weather after a man had called them on the radio.
The machine, she wrote, will do what the lamp does. It will not do what the keeper does, and nobody has yet written
down what that is. She proposed to install the machine and to keep the keeper, and she added the first page of the
green book as an appendix.
"""


@dataclass(frozen=True)
class Cost:
    """One kind of cache on the text."""

    kv_cache_dtype: str
    bytes_per_number: int
    perplexity: float
    agreement: float  # of the most likely tokens, with the first row's
    seconds: float


def most_likely(folder: Path, dtype: KVCacheDtype, token_ids: list[int]) -> tuple[float, list[int]]:
    """Perplexity of the tokens, and the most likely token at each position, with a cache of this dtype."""
    config = EngineConfig(
        model=ModelConfig(folder=str(folder), dtype="bfloat16"),
        scheduler=SchedulerConfig(max_model_len=len(token_ids) + 16, max_num_seqs=1, max_num_batched_tokens=256),
        device=DeviceConfig(device="cpu", kv_cache_dtype=dtype, kv_cache_memory_bytes=256 << 20),
        async_scheduling=False,
    )
    core, _ = build_engine_core(config, time.monotonic, lambda line: None)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    core.add(Request("text", list(token_ids), params))
    found = None
    while core.has_work():
        for output in core.step().outputs:
            found = output.prompt_logprobs or found
    core.close()
    if found is None:
        raise AssertionError("the engine returned no prompt logprobs")
    entries = [entry for entry in found if entry is not None]
    mean = sum(entry.logprobs[0] for entry in entries) / len(entries)
    return math.exp(-mean), [entry.token_ids[1] for entry in entries]


def costs(folder: Path, token_ids: list[int]) -> list[Cost]:
    """All kinds of cache, the model's own first."""
    rows: list[Cost] = []
    own: list[int] = []
    for dtype in get_args(KVCacheDtype):
        if dtype == "fp8_e4m3":
            continue  # what fp8 is
        started = time.monotonic()
        perplexity, best = most_likely(folder, dtype, token_ids)
        own = own or best
        same = sum(a == b for a, b in zip(own, best, strict=True)) / len(own)
        name = {"auto": "bfloat16", "fp8": "fp8 (e4m3)"}.get(dtype, dtype)
        rows.append(Cost(name, 2 if dtype == "auto" else 1, perplexity, same, time.monotonic() - started))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", help="folder, hub id or .gguf file; the demo model if left out")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    folder = resolve_model(args.model).folder
    token_ids = Tokenizer.load(folder).encode(TEXT)
    rows = costs(folder, token_ids)
    if args.json:
        json.dump({"tokens": len(token_ids), "rows": [asdict(row) for row in rows]}, sys.stdout, indent=1)
        print()
        return 0
    print(f"{len(token_ids)} tokens\n\n| KV cache | bytes a number | perplexity | change | greedy agreement |")
    print("|---|---:|---:|---:|---:|")
    for row in rows:
        change = row.perplexity / rows[0].perplexity - 1
        print(
            f"| {row.kv_cache_dtype} | {row.bytes_per_number} | {row.perplexity:.3f} | {change:+.2%} "
            f"| {row.agreement:.1%} |"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
