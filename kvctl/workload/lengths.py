"""How long prompts and answers are: fixed, uniform, normal or lognormal numbers of tokens. Seeded by the caller.

Pure; shared by bench and simulator. Floor 0.
"""

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kvctl.errors import ConfigError

Shape = Literal["fixed", "uniform", "normal", "lognormal"]


@dataclass(frozen=True)
class LengthSpec:
    """A distribution of token counts, cut to [low, high]. `mean` and `std` are of the uncut distribution."""

    shape: Shape = "fixed"
    mean: float = 1.0
    std: float = 0.0
    low: int = 1
    high: int = 1 << 30

    def __post_init__(self) -> None:
        if self.low < 0 or self.high < self.low or self.mean <= 0 or self.std < 0:
            raise ConfigError(
                f"no such lengths: {self.shape} mean {self.mean:g} std {self.std:g} [{self.low}, {self.high}]",
                hint="Give a mean above 0, a std of 0 or more, and low no more than high.",
            )

    @classmethod
    def fixed(cls, tokens: int) -> "LengthSpec":
        """Always the same."""
        return cls("fixed", tokens, low=tokens, high=tokens)

    @classmethod
    def parse(cls, text: str) -> "LengthSpec":
        """Read '512', '256..768' (uniform) or '512+-128' (normal).

        Raises:
            ConfigError: none of these, or not above 0.
        """
        hint = "Write 512, 256..768 (uniform) or 512+-128 (normal), all above 0."
        try:
            if ".." in text:
                low, high = (int(part) for part in text.split(".."))
                spec = cls("uniform", max((low + high) / 2, 1), low=low, high=high)
            elif "+-" in text:
                mean, std = (float(part) for part in text.split("+-"))
                spec = cls("normal", mean, std, max(1, round(mean - 4 * std)), max(1, round(mean + 4 * std)))
            else:
                spec = cls.fixed(int(text))
        except ValueError:
            raise ConfigError(f"{text!r} is no number of tokens", hint=hint) from None
        if spec.low < 1:
            raise ConfigError(f"{text!r} allows no tokens at all", hint=hint)
        return spec

    @classmethod
    def from_mapping(cls, value: object, where: str) -> "LengthSpec":
        """Read a number, a string as `parse` takes it, or {shape, mean, std, low, high} of a profile.

        Raises:
            ConfigError: `where` (a place in a file) holds none of these.
        """
        if isinstance(value, int) and not isinstance(value, bool):
            return cls.parse(str(value))
        if isinstance(value, str):
            return cls.parse(value)
        fields: dict[str, Any] = dict(value) if isinstance(value, Mapping) else {}
        known = {"shape", "mean", "std", "low", "high"}
        shapes = ("fixed", "uniform", "normal", "lognormal")
        if not fields or set(fields) - known or fields.get("shape", "fixed") not in shapes:
            raise ConfigError(
                f"{where}: {value!r} is no length", hint="Write 512, '256..768' or {shape, mean, std, low, high}."
            )
        if fields.get("shape") == "uniform":
            fields.setdefault("mean", max((fields.get("low", 1) + fields.get("high", 1)) / 2, 1))
        try:
            return cls(**fields)
        except TypeError:
            raise ConfigError(f"{where}: {value!r} is no length") from None

    def draw(self, rng: random.Random) -> int:
        """One length in tokens."""
        if self.shape == "uniform":
            return rng.randint(self.low, self.high)
        if self.shape == "normal":
            value = rng.gauss(self.mean, self.std)
        elif self.shape == "lognormal":
            # mean and std of the lognormal itself; those of its logarithm follow
            variance = math.log1p((self.std / self.mean) ** 2)
            value = rng.lognormvariate(math.log(self.mean) - variance / 2, math.sqrt(variance))
        else:
            value = self.mean
        return min(max(round(value), self.low), self.high)
