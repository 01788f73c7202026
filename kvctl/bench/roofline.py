"""Compares what was measured with what the hardware could do. Placeholder until sizing.speed is joined. Floor 3."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RooflineConfig:
    """The accelerator and the model to compare with."""

    gpu: str
    model: str | None = None
    num_gpus: int = 1


def predict(config: RooflineConfig, summary: Mapping[str, Any]) -> dict[str, Any] | None:
    """Predicted against measured."""
    return None
