import pytest

from kvctl.model.hardware import find_hardware
from kvctl.model.weight_size import Parallelism
from kvctl.sizing.kernel_time import Ceilings, decode_work, prefill_work, rows_work, store_kv_work
from kvctl.sizing.request import SizeRequest, size_up
from kvctl.sizing.sized_model import load_model
from kvctl.sizing.speed import SpeedModel

H100 = Ceilings(bytes_per_s=3e12, flop_per_s=700e12)


def test_decode_moves_every_key_and_value_once() -> None:
    # 64 requests of 4,096 tokens, 8 KV heads of 128 in bf16: 4,096 B per token and layer
    work = decode_work([4096] * 64, 32, 8, 128, 2)
    assert work.num_bytes == 64 * 4096 * 4096 + 2 * 64 * 32 * 128 * 2
    assert work.seconds(H100) == pytest.approx(work.num_bytes / 3e12 + 6e-6)


def test_fp8_halves_what_decode_reads() -> None:
    assert decode_work([1000], 8, 8, 64, 1).num_bytes - 2 * 8 * 64 * 2 == 1000 * 2 * 8 * 64


def test_a_shared_prefix_is_counted_once() -> None:
    alone = decode_work([2048] * 32, 32, 8, 128, 2)
    cascade = decode_work([2048] * 32, 32, 8, 128, 2, shared_tokens=1024)
    assert alone.num_bytes - cascade.num_bytes == 31 * 1024 * 4096
    assert alone.flop == cascade.flop


def test_prefill_counts_the_pairs_under_the_diagonal() -> None:
    assert prefill_work([4], [4], 1, 1, 1, 2).flop == 4 * 10
    assert prefill_work([2], [5], 1, 1, 1, 2).flop == 4 * (2 * 3 + 3)
    assert prefill_work([8192], [8192], 32, 8, 128, 2).seconds(H100) == pytest.approx(
        4 * 8192 * 8193 / 2 * 4096 / 700e12 + 3e-6
    )


def test_stores_and_rows() -> None:
    assert store_kv_work(10, 8, 128, 1).num_bytes == 10 * 2 * 8 * 128 * 3
    assert rows_work(4, 100, 50).num_bytes == 4 * 150 * 2


def test_the_speed_page_counts_the_bytes_and_operations_of_the_attention_kernels() -> None:
    # Llama 3.1 8B: 32 layers, 32 query heads and 8 KV heads of 128
    sized = SizeRequest(model=load_model("meta-llama/Llama-3.1-8B"), hardware=find_hardware("h100-sxm"))
    answer = size_up(sized)
    assert answer.weights is not None and sized.hardware is not None
    speed = SpeedModel(sized.model.shape, answer.specs, answer.weights, sized.hardware, Parallelism(1), answer.dtype)
    work = decode_work([4096] * 64, 32, 8, 128, 2)
    assert speed.decode_bytes(64, 4096)[1] == 32 * (work.num_bytes - 2 * 64 * 32 * 128 * 2)
    assert speed.attention_flops(64, 4096) == 32 * work.flop
