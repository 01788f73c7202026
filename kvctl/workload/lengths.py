"""How long prompts and answers are: fixed, uniform, normal or lognormal numbers of tokens. Seeded by the caller.

Pure; shared by bench and simulator. Floor 0.
"""

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

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
        if not (1 <= self.low <= self.high and math.isfinite(self.mean) and self.mean > 0 and 0 <= self.std < math.inf):
            raise ConfigError(
                f"no such lengths: {self.shape} mean {self.mean:g} std {self.std:g} [{self.low}, {self.high}]",
                hint="Give a mean above 0, a std of 0 or more, and low of at least 1 and no more than high.",
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
                return cls("uniform", (low + high) / 2, low=low, high=high)
            if "+-" in text:
                mean, std = (float(part) for part in text.split("+-"))
                return cls("normal", mean, std, max(1, round(mean - 4 * std)), max(1, round(mean + 4 * std)))
            return cls.fixed(int(text))
        except (ValueError, OverflowError, ConfigError):
            raise ConfigError(f"{text!r} is no number of tokens", hint=hint) from None

    @classmethod
    def from_mapping(cls, value: object, where: str) -> "LengthSpec":
        """Read a number, a string as `parse` takes it, or {shape, mean, std, low, high} of a profile.

        Raises:
            ConfigError: `where` (a place in a file) holds none of these.
        """
        try:
            if isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool)):
                return cls.parse(str(value))
            return cls._from_fields(dict(value) if isinstance(value, Mapping) else {}, value)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error.message}", hint=error.hint) from None

    @classmethod
    def _from_fields(cls, fields: dict[str, Any], written: object) -> "LengthSpec":
        hint = "Write 512, '256..768' or {shape, mean, std, low, high}; uniform needs low and high."
        is_known = not set(fields) - {"shape", "mean", "std", "low", "high"}
        is_uniform = fields.get("shape") == "uniform"
        has_ends = not is_uniform or {"low", "high"} <= set(fields)
        are_whole = all(isinstance(fields.get(name, 1), int) for name in ("low", "high"))
        if not (fields and is_known and has_ends and are_whole and fields.get("shape", "fixed") in get_args(Shape)):
            raise ConfigError(f"{written!r} is no length", hint=hint)
        if is_uniform:
            fields.setdefault("mean", (fields["low"] + fields["high"]) / 2)
        try:
            return cls(**fields)
        except TypeError:
            raise ConfigError(f"{written!r} is no length", hint=hint) from None

    def draw(self, rng: random.Random) -> int:
        """One length in tokens."""
        if self.low == self.high:
            return self.low
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
