"""What `kvctl size` reads besides models: a server's log or /metrics page, and the lengths of a workload. Floor 4."""

import random
from dataclasses import dataclass
from pathlib import Path

from kvctl.errors import ConfigError, ServerUnreachable
from kvctl.sizing.server_log import ServerLog, parse_server_log

MAX_LOG_BYTES = 64 << 20
_DRAWS = 4000


def read_log(place: str) -> ServerLog:
    """Read a log file or fetch a page.

    Raises:
        ConfigError: no such file, or one too large to be a start-up log.
        ServerUnreachable: the URL does not answer.
    """
    if place.startswith(("http://", "https://")):
        import httpx

        raw = bytearray()
        try:
            with httpx.stream("GET", place, timeout=5.0, follow_redirects=True) as response:
                response.raise_for_status()
                for chunk in response.iter_bytes():
                    raw += chunk
                    if len(raw) > MAX_LOG_BYTES:
                        raise ConfigError(f"{place} sends more than 64 MiB", hint="Give its /metrics URL.")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ServerUnreachable(f"{place} does not answer: {error}", hint="Give its /metrics URL.") from error
        return parse_server_log(raw.decode("utf-8", "replace"))
    path = Path(place).expanduser()
    if not path.is_file():
        raise ConfigError(f"--calibrate names {place}, which is not a file", hint="Give a start-up log or a URL.")
    if path.stat().st_size > MAX_LOG_BYTES:
        raise ConfigError(f"{place} is larger than 64 MiB", hint="Cut it to the start-up part.")
    return parse_server_log(path.read_text(encoding="utf-8", errors="replace"))


@dataclass(frozen=True, slots=True)
class WorkloadLengths:
    """The context that `users` of a workload hold on average with a margin, and what they share."""

    context_tokens: int
    shared_tokens: int
    longest_tokens: int


def workload_lengths(name: str, users: int) -> WorkloadLengths:
    """Draw requests of a workload: the mean context of `users` at once, two standard errors up.

    Raises:
        ConfigError: no such workload.
    """
    from kvctl.workload.workload_profile import load_profile

    profile = load_profile(name)
    rng = random.Random(0)
    weights = [c.weight for c in profile.classes]
    contexts = []
    for _ in range(_DRAWS):
        chosen = rng.choices(profile.classes, weights)[0]
        turns = chosen.turns.draw(rng)
        tokens = chosen.prefix_tokens + sum(
            chosen.input_tokens.draw(rng) + chosen.output_tokens.draw(rng) for _ in range(turns)
        )
        contexts.append(tokens)
    mean = sum(contexts) / len(contexts)
    spread = (sum((c - mean) ** 2 for c in contexts) / len(contexts)) ** 0.5
    shared = min((c.prefix_tokens for c in profile.classes if c.prefix_groups == 1), default=0)
    return WorkloadLengths(
        int(mean + 2 * spread / users**0.5), shared if len(profile.classes) == 1 else 0, max(contexts)
    )
