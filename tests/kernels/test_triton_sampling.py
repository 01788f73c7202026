"""The race for a token as a Triton kernel, in the interpreter: the draws of torch's race."""

import pytest
import torch

from kvctl.engine.sampler_random import keys_tensor, race_noise, token_key
from kvctl.engine.sampler_random import race as torch_race
from tests.support.triton_interpreter import repair

repair()
from kvctl_kernels.triton_sampling import race  # noqa: E402 (after the switch)

# numpy warns of overflows that a hash wants, and of log(0), which never wins.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def keys_of(count: int) -> torch.Tensor:
    return keys_tensor([token_key(7 + i, 3 * i) for i in range(count)], torch.device("cpu"))


@pytest.mark.parametrize("vocab_size", [1, 100, 1024, 5000, 33000])
def test_the_race_is_won_by_the_same_tokens_as_in_torch(vocab_size: int) -> None:
    torch.manual_seed(vocab_size)
    scaled, keys = torch.randn(4, vocab_size) * 3, keys_of(4)
    assert race(scaled, keys).tolist() == torch_race(scaled, keys).tolist()


def test_rows_of_a_wider_tensor_and_banned_tokens() -> None:
    torch.manual_seed(1)
    scaled, keys = torch.randn(3, 4000)[:, :3000], keys_of(3)
    scaled[0] = float("-inf")
    scaled[0, 1234] = 0.0
    scaled[1] = float("-inf")  # everything is banned: token 0, as argmax has it
    assert race(scaled, keys).tolist()[:2] == [1234, 0]
    assert race(scaled, keys).tolist() == torch_race(scaled, keys).tolist()


def test_a_draw_does_not_depend_on_its_batch() -> None:
    torch.manual_seed(2)
    scaled, keys = torch.randn(3, 2100), keys_of(3)
    assert race(scaled, keys).tolist() == [int(race(scaled[i : i + 1], keys[i : i + 1])) for i in range(3)]


def test_equal_logits_are_drawn_equally_often() -> None:
    keys = keys_tensor([token_key(1, i) for i in range(100)], torch.device("cpu"))
    counts = race(torch.zeros(100, 4), keys).bincount(minlength=4)
    assert counts.sum() == 100 and counts.min() > 12
    assert race_noise(keys, torch.arange(4).unsqueeze(0)).argmax(dim=1).bincount(minlength=4).equal(counts)
