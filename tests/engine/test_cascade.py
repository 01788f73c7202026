"""When a shared prefix is read once: found in block tables, decided by bytes and bandwidth."""

import numpy as np
import pytest

from kvctl.engine.cascade import COST_S, CascadeRule, device_bytes_per_s, num_shared_blocks


@pytest.mark.parametrize(
    ("tables", "shortest", "expected"),
    [
        ([[5, 6, 7], [5, 6, 8]], 48, 2),
        ([[5, 6, 7], [5, 6, 7]], 48, 3),
        ([[5, 6, 7], [5, 6, 7]], 47, 2),  # the last block is not whole in one of them
        ([[5, 6, 7], [4, 6, 7]], 48, 0),
        ([[0, 6, 7], [0, 6, 7]], 48, 0),  # a window has passed
        ([[5, 6, 7]], 15, 0),
    ],
)
def test_shared_blocks_are_the_leading_ones_that_all_have_whole(tables, shortest, expected):
    assert num_shared_blocks(np.array(tables, dtype=np.int32), shortest, 16) == expected


def test_a_cascade_pays_when_the_reads_it_saves_take_longer_than_it_costs():
    # 8 KV heads of 128 in bfloat16: 4 KiB a token and layer; 12 us at 3 TB/s are 36 MB: 8,789 tokens
    rule = CascadeRule(frozenset({0}), token_bytes=4096, bytes_per_s=3e12)
    tokens = COST_S * 3e12 / 4096
    assert not rule.pays(2, int(tokens)) and rule.pays(2, int(tokens) + 1)
    assert not rule.pays(1, 10**9), "one request shares with nobody"
    assert rule.pays(9, int(tokens / 8) + 1), "eight others save eight reads"
    half = CascadeRule(frozenset({0}), token_bytes=2048, bytes_per_s=3e12)
    assert not half.pays(2, int(tokens) + 1) and half.pays(2, 2 * int(tokens) + 2), "float8 pages hold half the bytes"


def test_slow_memory_makes_it_pay_sooner():
    assert device_bytes_per_s("NVIDIA L4") < 1e12 < device_bytes_per_s("NVIDIA H200") < 1e13
    assert device_bytes_per_s("a GPU of tomorrow") == 3e12
