"""Root-mean-square norm of a layer: a weight, an epsilon and the kernels that apply them.

Knows no model. Gemma's (1 + w) is already folded into the weight when it is loaded. Floor 2.
"""

from torch import Tensor

from kvctl.engine.ops import Ops


class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension. Source: Zhang and Sennrich, 2019."""

    __slots__ = ("_eps", "_ops", "_weight")

    def __init__(self, weight: Tensor, eps: float, ops: Ops) -> None:
        self._weight = weight
        self._eps = eps
        self._ops = ops

    @property
    def weight(self) -> Tensor:
        """[hidden_size]."""
        return self._weight

    @property
    def eps(self) -> float:
        """Added to the mean of the squares."""
        return self._eps

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise x [..., hidden_size]."""
        return self._ops.rms_norm(x, self._weight, self._eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return (norm(x + residual), x + residual), both [num_tokens, hidden_size]."""
        return self._ops.rms_norm_residual(x, residual, self._weight, self._eps)
