"""The options of `kvctl top`, checked once and in their own types. Opens nothing. Floor 3."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvctl.errors import ConfigError
from kvctl.top.endpoint import DEFAULT_URL, Endpoint, parse_endpoint
from kvctl.top.scrape import ScrapeOptions
from kvctl.top.timing import MAX_INTERVAL_S, MIN_INTERVAL_S, WINDOWS_S
from kvctl.units import parse_seconds

_MAX_SPEED = 1000.0
LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")  # servers whose GPUs this machine's NVML can read


@dataclass(frozen=True, slots=True)
class TopSettings:
    """What to watch and how."""

    endpoints: tuple[Endpoint, ...]
    options: ScrapeOptions
    interval_s: float
    window_s: float
    summed: bool
    record: Path | None
    replay: Path | None
    speed: float
    demo: bool


def make_settings(
    *,
    urls: Sequence[str],
    interval: str,
    window: str,
    summed: bool,
    headers: Sequence[str],
    api_key: str | None,
    wants_api_key: bool,
    insecure: bool,
    timeout: str,
    record: Path | None,
    replay: Path | None,
    speed: float,
    demo: bool,
    once: bool,
    as_json: bool,
) -> TopSettings:
    """Check every option.

    Raises:
        ConfigError: an impossible value or combination.
    """
    if as_json and not once:
        raise ConfigError("--json goes with --once", hint="kvctl top --once --json")
    if sum((bool(urls), replay is not None, demo)) > 1:
        raise ConfigError("an address, --replay and --demo exclude each other", hint="Give one of them.")
    if record is not None and (replay is not None or demo):
        raise ConfigError("--record records servers only", hint="Leave --replay and --demo out.")
    if record is not None and record.is_dir():
        raise ConfigError(f"{record} is a folder", hint="Give a file name for --record.")
    interval_s = parse_seconds(interval)
    if not MIN_INTERVAL_S <= interval_s <= MAX_INTERVAL_S:
        raise ConfigError(f"--interval is {interval}", hint=f"Give {MIN_INTERVAL_S:g} s to {MAX_INTERVAL_S:g} s.")
    window_s = parse_seconds(window)
    if window_s not in WINDOWS_S:
        raise ConfigError(f"--window is {window}", hint="Choose 5s, 15s or 60s.")
    timeout_s = parse_seconds(timeout)
    if timeout_s <= 0:
        raise ConfigError(f"--timeout is {timeout}", hint="Give more than 0 s.")
    if not 0 < speed <= _MAX_SPEED:
        raise ConfigError(f"--speed is {speed:g}", hint=f"Give more than 0, at most {_MAX_SPEED:g}.")
    if wants_api_key and api_key is None:
        raise ConfigError("--api-key is given and no key is set", hint="Set KVCTL_API_KEY in the environment.")
    if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
        raise ConfigError("the API key holds characters that no header can carry", hint="Check KVCTL_API_KEY.")
    endpoints = tuple(parse_endpoint(url) for url in (urls or [DEFAULT_URL]))
    distinct = tuple({endpoint.url: endpoint for endpoint in endpoints}.values())
    return TopSettings(
        endpoints=distinct,
        options=ScrapeOptions(_parse_headers(headers), api_key, insecure, timeout_s),
        interval_s=interval_s,
        window_s=window_s,
        summed=summed,
        record=record,
        replay=replay,
        speed=speed,
        demo=demo,
    )


def _parse_headers(headers: Sequence[str]) -> dict[str, str]:
    parsed = {}
    for header in headers:
        name, colon, value = header.partition(":")
        name, value = name.strip(), value.strip()
        if not colon or not name or not name.replace("-", "").replace("_", "").isalnum() or not header.isascii():
            raise ConfigError("a --header is not 'Name: value'", hint="Write it like 'X-Team: search'.")
        if not value.isprintable():
            raise ConfigError(f"the value of --header {name} has control characters", hint="Remove them.")
        parsed[name] = value
    return parsed
