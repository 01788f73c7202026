"""A model's config and weight sizes from the Hugging Face hub: small files and headers by range, never weights.

Knows the hub's URLs; httpx is imported only when the hub can be reached. Floor 0.
"""

import os
import socket
import threading
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from kvctl.errors import InvalidRequest, ModelBroken, ModelNotFound
from kvctl.model.lookup import MAX_CONFIG_BYTES, FoundModel, parse_config
from kvctl.model.safetensors_header import TensorInfo, read_header

if TYPE_CHECKING:
    import httpx

REACH_S = 2.0  # what an unreachable hub may cost
TRANSFER_S = 20.0
_MAX_INDEX_BYTES = 64 << 20


class HubUnreachable(InvalidRequest):
    """The hub does not answer; what was asked may still be found elsewhere."""


def is_offline() -> bool:
    """Whether the user has switched the hub off."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON")


def _endpoint() -> str:
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")


def _reach(endpoint: str) -> None:
    """Look the host up and connect, within REACH_S in all: name lookups have no timeout of their own."""
    parts = urlsplit(endpoint)
    host, port = parts.hostname or "", parts.port or (80 if parts.scheme == "http" else 443)
    errors: list[str] = ["no answer"]

    def connect() -> None:
        try:
            socket.create_connection((host, port), timeout=REACH_S).close()
            errors.clear()
        except OSError as error:
            errors[0] = str(error.strerror or error)

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(REACH_S)
    if errors:
        raise HubUnreachable(f"{host} cannot be reached ({errors[0]})", hint="Set HF_HUB_OFFLINE=1 to not try.")


def fetch_from_hub(name: str) -> FoundModel:
    """Fetch config.json, and the headers or the index of the weights.

    Raises:
        HubUnreachable: no network, or the hub fails.
        ModelNotFound: no such model there, or it is gated.
        ModelBroken: what the hub sent is damaged.
    """
    endpoint = _endpoint()
    _reach(endpoint)
    import httpx  # 30 MB and a tenth of a second that no offline answer needs

    token = os.environ.get("HF_TOKEN")
    headers = {"authorization": f"Bearer {token}"} if token else {}
    base = f"{endpoint}/{name}/resolve/main"
    try:
        with httpx.Client(timeout=TRANSFER_S, follow_redirects=True, headers=headers) as client:
            config = parse_config(_get(client, f"{base}/config.json", name, MAX_CONFIG_BYTES), f"{name}/config.json")
            tensors, total = _weights(client, base, name)
    except httpx.HTTPError as error:
        raise HubUnreachable(
            f"{urlsplit(endpoint).hostname} failed: {error}", hint="Try again, or give a file."
        ) from error
    return FoundModel(name, config, f"hub {urlsplit(endpoint).hostname}, now", tensors, total)


def _get(client: "httpx.Client", url: str, name: str, limit: int) -> bytes:
    with client.stream("GET", url) as response:
        if response.status_code in (401, 403, 404):
            reason = "has no such model or file" if response.status_code == 404 else "does not let you read it"
            raise ModelNotFound(f"{name}: the hub {reason}", hint="Check the name; for a gated model set HF_TOKEN.")
        response.raise_for_status()
        raw = bytearray()
        for chunk in response.iter_bytes():
            raw += chunk
            if len(raw) > limit:
                raise ModelBroken(f"{name}: {url.rsplit('/', 1)[-1]} is over {limit >> 20} MiB", hint="Give a file.")
    return bytes(raw)


def _weights(client: "httpx.Client", base: str, name: str) -> tuple[tuple[TensorInfo, ...] | None, int | None]:
    """Tensors of a single file, or the total that an index of many states; neither is an error of its own."""
    try:
        index: dict[str, Any] = parse_config(
            _get(client, f"{base}/model.safetensors.index.json", name, _MAX_INDEX_BYTES), "index"
        )
        total = index.get("metadata", {}).get("total_size")
        return None, int(total) if isinstance(total, int | float) and total > 0 else None
    except ModelNotFound:
        pass
    url = f"{base}/model.safetensors"
    head = client.head(url)
    size = int(head.headers.get("x-linked-size") or head.headers.get("content-length") or 0)
    if head.status_code != 200 or size < 8:
        return None, None

    def read(offset: int, length: int) -> bytes:
        with client.stream("GET", url, headers={"range": f"bytes={offset}-{offset + length - 1}"}) as answer:
            if answer.status_code != 206:
                raise ModelBroken(f"{name}: the hub ignores byte ranges", hint="Give a local folder.")
            raw = bytearray()
            for chunk in answer.iter_bytes():
                raw += chunk
                if len(raw) >= length:
                    break
        return bytes(raw[:length])

    return tuple(read_header(read, size, f"{name}/model.safetensors")), None
