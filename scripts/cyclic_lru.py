"""Read the same documents in a circle, then backwards, and see what a prefix cache of fixed size is worth.

Ten documents of 5,033 tokens, no shared prefixes, one request at a time, one token each: in order, again in order, in
reverse. A cache that evicts the least recently used block gets nothing from reading in a circle, and as much as it
holds when the direction turns. A server that was started with

    kvctl serve --num-gpu-blocks-override 1345 --block-size 16

has 21,504 tokens of cache and must print 0, 0 and 21,488 tokens. Works against any OpenAI-compatible server that
reports cached tokens; of one with vLLM's metrics the counter is compared too. Needs only httpx.
"""

import argparse
import os
import random
import secrets
import sys
import time

import httpx

HITS_METRIC = "vllm:prefix_cache_hits_total"


def metric_total(client: httpx.Client, name: str) -> float | None:
    """Return the sum of a counter over its labels, or None if the server has no such counter."""
    response = client.get("/metrics")
    if response.status_code != httpx.codes.OK:
        return None
    values = [
        float(line.rsplit(" ", 1)[1])
        for line in response.text.splitlines()
        if line.startswith((name + " ", name + "{"))
    ]
    return sum(values) if values else None


def read(client: httpx.Client, model: str, document: list[int]) -> int:
    """Send one document and return how many of its tokens the server had in its cache."""
    body = {"model": model, "prompt": document, "max_tokens": 1, "temperature": 0}
    response = client.post("/v1/completions", json=body)
    if response.status_code != httpx.codes.OK:
        sys.exit(f"cyclic_lru: HTTP {response.status_code}: {response.text[:300]}")
    usage = response.json()["usage"]
    if usage["prompt_tokens"] != len(document):
        sys.exit(f"cyclic_lru: sent {len(document)} tokens, the server counted {usage['prompt_tokens']}")
    return int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", help="default: the first one that the server names")
    parser.add_argument("--documents", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=5033, help="tokens of each document")
    parser.add_argument(
        "--seed", type=int, default=None, help="default: another one each time, so that no run helps the next"
    )
    parser.add_argument("--expect", help="hits of the three passes, e.g. 0,0,21488: exit code 1 if they differ")
    options = parser.parse_args()
    dice = random.Random(secrets.randbits(32) if options.seed is None else options.seed)
    documents = [[dice.randrange(1000, 20_000) for _ in range(options.tokens)] for _ in range(options.documents)]
    orders = [("in order", documents), ("again in order", documents), ("in reverse", documents[::-1])]
    totals = []
    key = os.environ.get("KVCTL_API_KEY") or os.environ.get("VLLM_API_KEY") or os.environ.get("OPENAI_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with httpx.Client(base_url=options.url, timeout=300, trust_env=False, headers=headers) as client:
        try:
            model = options.model or client.get("/v1/models").raise_for_status().json()["data"][0]["id"]
        except httpx.HTTPError as error:
            sys.exit(f"cyclic_lru: no server answers at {options.url}: {error}")
        print(f"{options.documents} documents of {options.tokens:,} tokens to {model}, one at a time")
        for name, order in orders:
            before = metric_total(client, HITS_METRIC)
            start = time.monotonic()
            hits = [read(client, model, document) for document in order]
            seconds = time.monotonic() - start
            totals.append(sum(hits))
            after = metric_total(client, HITS_METRIC)
            print(f"  {name:<15} {sum(hits):>7,} cached tokens   {seconds:6.1f} s   each: {' '.join(map(str, hits))}")
            if before is not None and after is not None and after - before != sum(hits):
                sys.exit(
                    f"cyclic_lru: the answers say {sum(hits)} cached tokens, {HITS_METRIC} says {after - before:g}"
                )
    if options.expect and totals != [int(hits) for hits in options.expect.split(",")]:
        print(f"expected {options.expect}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
