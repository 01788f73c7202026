import hashlib
import struct
import subprocess
import sys

from kvctl.core.block_hash import BlockHasher
from kvctl.core.request import Request
from kvctl.core.sampling_params import SamplingParams


def request(tokens: list[int], **options: object) -> Request:
    return Request("r", tokens, SamplingParams(), **options)  # type: ignore[arg-type]


def hashes(tokens: list[int], **options: object) -> list[bytes]:
    made = request(tokens, **options)
    BlockHasher(4).extend(made)
    return made.block_hashes


def test_the_chain_is_parent_then_tokens() -> None:
    root = hashlib.sha256(b"kvctl: no parent block").digest()
    first = hashlib.sha256(root + struct.pack("<4I", 1, 2, 3, 4)).digest()
    second = hashlib.sha256(first + struct.pack("<4I", 5, 6, 7, 8)).digest()
    assert hashes([1, 2, 3, 4, 5, 6, 7, 8, 9]) == [first, second]


def test_only_full_blocks_have_a_name() -> None:
    assert hashes([1, 2, 3]) == []
    assert len(hashes(list(range(11)))) == 2


def test_equal_blocks_after_different_prefixes_have_different_names() -> None:
    assert hashes([1, 2, 3, 4, 9, 9, 9, 9])[1] != hashes([4, 3, 2, 1, 9, 9, 9, 9])[1]


def test_a_salt_stands_in_the_first_block_and_is_carried_on_by_the_chain() -> None:
    plain, salted, other = (
        hashes(list(range(8))),
        hashes(list(range(8)), cache_salt="a"),
        hashes(list(range(8)), cache_salt="b"),
    )
    assert len({plain[0], salted[0], other[0]}) == 3
    assert len({plain[1], salted[1], other[1]}) == 3


def test_an_adapter_is_part_of_every_block() -> None:
    first, second = hashes(list(range(8)), lora_name="a"), hashes(list(range(8)), lora_name="b")
    assert not set(first) & set(second)


def test_the_salt_is_in_the_first_block_alone_and_the_adapter_in_each() -> None:
    first, second = hashes(list(range(8)), cache_salt="s", lora_name="l")
    root = hashlib.sha256(b"kvctl: no parent block").digest()
    assert first == hashlib.sha256(root + struct.pack("<4I", 0, 1, 2, 3) + b"lora:1:l" + b"salt:1:s").digest()
    assert second == hashlib.sha256(first + struct.pack("<4I", 4, 5, 6, 7) + b"lora:1:l").digest()


def test_keys_cannot_be_shifted_into_each_other() -> None:
    assert hashes([1, 2, 3, 4], cache_salt="x", lora_name="") != hashes([1, 2, 3, 4], lora_name="x")
    assert hashes([1, 2, 3, 4], cache_salt="a:1:b") != hashes([1, 2, 3, 4], cache_salt="b", lora_name="a")


def test_growing_a_request_hashes_no_block_twice() -> None:
    hasher = BlockHasher(4)
    calls: list[bytes] = []
    real = hasher._hash
    hasher._hash = lambda data: (calls.append(data), real(data))[1]
    made = request(list(range(8)))
    hasher.extend(made)
    assert len(calls) == 2
    for token in range(8, 17):
        made.token_ids.append(token)
        hasher.extend(made)
    assert len(calls) == 4
    assert made.block_hashes == hashes(list(range(17)))


def test_hashes_are_equal_across_processes() -> None:
    code = (
        "from kvctl.core.block_hash import BlockHasher as B; from kvctl.core.request import Request as R;"
        "from kvctl.core.sampling_params import SamplingParams as S; r = R('x', list(range(8)), S(), cache_salt='s');"
        "B(4).extend(r); print(r.block_hashes[1].hex())"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": seed}
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert seen == {hashes(list(range(8)), cache_salt="s")[1].hex()}


def test_xxhash_is_a_choice() -> None:
    xxhash = __import__("xxhash")
    made = request([1, 2, 3, 4])
    BlockHasher(4, "xxhash").extend(made)
    root = xxhash.xxh3_128_digest(b"kvctl: no parent block")
    assert made.block_hashes == [xxhash.xxh3_128_digest(root + struct.pack("<4I", 1, 2, 3, 4))]
