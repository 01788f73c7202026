"""One gated MLP: gate and up in one product, their activation, down. Knows no model. Floor 2."""

from collections.abc import Callable

from torch import Tensor

from kvctl.engine.layers.linear import Linear


class GatedMLP:
    """down(activation(gate(x)) * up(x))."""

    __slots__ = ("_activate", "_down", "_gate_up")

    def __init__(self, gate_up: Linear, down: Linear, activate: Callable[[Tensor], Tensor]) -> None:
        self._gate_up = gate_up
        self._down = down
        self._activate = activate

    def __call__(self, x: Tensor) -> Tensor:
        """x [num_tokens, hidden_size]; returns like x."""
        return self._down(self._activate(self._gate_up(x)))
