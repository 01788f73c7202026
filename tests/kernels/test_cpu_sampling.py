"""The native choice of tokens against numpy and against the plain torch one, which has tests of its own."""

import itertools

import pytest
import torch

from kvctl.engine.sampler import TorchSampling
from kvctl.engine.sampler_random import filtered_race, keys_tensor, mix64
from kvctl_kernels.cpu_sampling import NativeSampling
from tests.kernels.conftest import NATIVE_BUILDS


@pytest.fixture(params=NATIVE_BUILDS)
def native(request, native_library):
    return NativeSampling(native_library(request.param), 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_argmax_is_the_first_of_the_largest(native, dtype):
    logits = torch.randn(20, 1003, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits[3] = 0
    logits[4, 1000:] = 99
    logits[5] = float("-inf")
    logits[6, [800, 17, 401]] = 50
    for part in (logits, logits[:, 5:900], logits[2:3], logits[:0]):
        assert native.argmax(part).tolist() == part.float().numpy().argmax(axis=1).tolist()


def settings():
    """top_k, top_p, min_p of every kind, alone and together."""
    return list(itertools.product((0, 1, 7, 64, 900, 10**6), (1.0, 0.999, 0.9, 0.3, 1e-6), (0.0, 1e-6, 0.05, 1.0)))


@pytest.mark.parametrize("spread", [0.0, 0.5, 3.0, 40.0])
def test_draws_equal_those_of_plain_torch(native, spread):
    rows = settings()
    generator = torch.Generator().manual_seed(int(spread))
    logits = torch.randn(len(rows), 3001, generator=generator) * spread
    logits[::3] = logits[::3].bfloat16().float()  # many equal ones
    logits[1::5, 40:2900] = float("-inf")
    keys = keys_tensor([mix64(i) for i in range(len(rows))], torch.device("cpu"))
    top_k = torch.tensor([row[0] for row in rows])
    top_p = torch.tensor([row[1] for row in rows])
    min_p = torch.tensor([row[2] for row in rows])
    got = native.draw(logits, keys, top_k, top_p, min_p)
    want = TorchSampling().draw(logits, keys, top_k, top_p, min_p)
    left = want < 0  # what the first look did not settle
    want[left] = filtered_race(logits[left], keys[left], top_k[left], top_p[left], min_p[left])
    assert got.tolist() == want.tolist()


def test_a_row_with_everything_banned_still_gives_a_token(native):
    rows = settings()
    logits = torch.full((len(rows), 100), float("-inf"))
    keys = keys_tensor([7] * len(rows), torch.device("cpu"))
    top_k, top_p, min_p = (torch.tensor(column) for column in zip(*rows, strict=True))
    tokens = native.draw(logits, keys, top_k, top_p, min_p)
    assert ((tokens >= 0) & (tokens < 100)).all()
