"""Token ids to vectors. Knows no model beyond an optional constant factor (Gemma's sqrt(hidden_size)). Floor 2."""

from collections.abc import Callable

import torch
from torch import Tensor


class Embedding:
    """A lookup and a factor that is rounded to the model's dtype first, as transformers does.

    `lookup`: int64 [num_tokens] -> a fresh [num_tokens, hidden_size]; a tied output matrix gives its own rows, so
    that the table is held once, in whatever layout its backend multiplies with.
    """

    __slots__ = ("_lookup", "_scale")

    def __init__(self, lookup: Callable[[Tensor], Tensor], scale: float | None, dtype: torch.dtype) -> None:
        self._lookup = lookup
        self._scale = None if scale is None else torch.tensor(scale).to(dtype).item()

    def __call__(self, token_ids: Tensor) -> Tensor:
        """Look up int64 [num_tokens]; returns [num_tokens, hidden_size]."""
        vectors = self._lookup(token_ids)
        return vectors if self._scale is None else vectors.mul_(self._scale)
