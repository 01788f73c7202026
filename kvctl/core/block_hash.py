"""Names for the content of full blocks: a chain of hashes, so that equal names mean equal prefixes.

    hash of block i = H(hash of block i-1, the block's tokens, extra keys)

Extra keys keep apart what tokens cannot tell: the LoRA adapter (every block) and the tenant's `cache_salt`
(first block only: the chain carries it on). Equal across processes and machines: no per-process seed.
Knows no blocks and no pool. Floor 0.

sha256 is the default because a hash that can be forged lets one client read another's cache; xxhash (128 bit)
is about twice as fast and for trusted clients only.
"""

import hashlib
import struct
from collections.abc import Callable
from importlib import import_module

from kvctl.core.config import HashAlgo
from kvctl.core.request import Request
from kvctl.errors import ConfigError

HashFunction = Callable[[bytes], bytes]
_ROOT_SEED = b"kvctl: no parent block"


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def hash_function(algo: HashAlgo) -> HashFunction:
    """The function behind a name.

    Raises:
        ConfigError: `xxhash` is asked for and not installed.
    """
    if algo == "sha256":
        return _sha256
    try:
        digest: HashFunction = import_module("xxhash").xxh3_128_digest
    except ImportError as error:
        raise ConfigError("the package xxhash is not installed", hint="pip install xxhash, or use sha256.") from error
    return digest


def _extra_keys(*named: tuple[str, str | None]) -> bytes:
    """Encode the keys that are set so that no two different sets give the same bytes (lengths go in front)."""
    parts = []
    for name, value in named:
        if value is not None:
            raw = value.encode("utf-8", "surrogatepass")
            parts.append(f"{name}:{len(raw)}:".encode() + raw)
    return b"".join(parts)


class BlockHasher:
    """Extends `request.block_hashes` by the blocks that have become full; never hashes a block twice."""

    def __init__(self, block_size: int, algo: HashAlgo = "sha256") -> None:
        self.block_size = block_size
        self._hash = hash_function(algo)
        self._root = self._hash(_ROOT_SEED)
        self._pack = struct.Struct(f"<{block_size}I").pack

    def extend(self, request: Request) -> None:
        """Hash every full block of the request's tokens that has no hash yet."""
        hashes = request.block_hashes
        size = self.block_size
        tokens = request.token_ids
        num_full = len(tokens) // size
        if len(hashes) >= num_full:
            return
        parent = hashes[-1] if hashes else self._root
        on_every_block = _extra_keys(("lora", request.lora_name)) if request.lora_name else b""
        for index in range(len(hashes), num_full):
            data = parent + self._pack(*tokens[index * size : (index + 1) * size]) + on_every_block
            if index == 0 and request.cache_salt is not None:
                data += _extra_keys(("salt", request.cache_salt))
            parent = self._hash(data)
            hashes.append(parent)
