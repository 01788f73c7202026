"""A mix of request classes: how long, how often, what they share, how many turns. Read from YAML, or put together.

Knows lengths and shares; nothing of the texts of datasets or of arrival times. Shared by bench and simulator.
Floor 0.

    name: chat                    # one of profiles/workloads, or any file of this shape
    description: ...
    source: ...
    classes:
      - name: chat
        weight: 0.8               # relative
        input_tokens: {shape: lognormal, mean: 400, std: 500, low: 8, high: 4096}
        output_tokens: 200..400
        shared_prefix: {groups: 1, tokens: 120}       # a system prompt; groups have one each
        turns: {count: 1..4, think: 2s}               # each turn adds input_tokens to the history
"""

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from kvctl.errors import ConfigError
from kvctl.units import parse_seconds
from kvctl.workload.lengths import LengthSpec
from kvctl.workload.prompts import PromptMaker
from kvctl.workload.request_plan import Session, Turn

_CLASS_FIELDS = {"name", "weight", "input_tokens", "output_tokens", "shared_prefix", "turns"}

_ONE_TURN = LengthSpec.fixed(1)


@dataclass(frozen=True)
class WorkloadClass:
    """One kind of session."""

    name: str
    input_tokens: LengthSpec
    output_tokens: LengthSpec
    weight: float = 1.0
    prefix_groups: int = 0  # sessions of one group share their first `prefix_tokens`
    prefix_tokens: int = 0
    turns: LengthSpec = _ONE_TURN
    think_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.weight > 0:
            raise ConfigError(f"class {self.name!r} has weight {self.weight:g}", hint="Give it a weight above 0.")
        if self.prefix_groups < 0 or self.prefix_tokens < 0:
            raise ConfigError(f"class {self.name!r} shares fewer than no tokens")


@dataclass(frozen=True)
class WorkloadProfile:
    """Classes with weights."""

    name: str
    classes: tuple[WorkloadClass, ...]
    description: str = ""
    source: str = ""

    def sessions(self, maker: PromptMaker, *, cache_bust: bool = False) -> Iterator[Session]:
        """Yield sessions without end. `cache_bust`: shared prefixes are made different too."""
        rng = random.Random(f"profile-{maker.seed}")
        weights = list(accumulate(workload_class.weight for workload_class in self.classes))
        rate = maker.rate
        chosen = self.classes[0]
        while True:
            if len(weights) > 1:
                chosen = rng.choices(self.classes, cum_weights=weights)[0]
            system, num_words = "", 0
            if chosen.prefix_groups and chosen.prefix_tokens:
                num_words = rate.words_within(chosen.prefix_tokens)
                if cache_bust:
                    system = maker.unique(num_words)
                else:
                    group = rng.randrange(chosen.prefix_groups)
                    system = maker.keyed((self.name, chosen.name, group), num_words)
            turns = []
            for i in range(chosen.turns.draw(rng)):
                asked = chosen.input_tokens.draw(rng)
                total = asked + (chosen.prefix_tokens if system else 0) if i == 0 else None
                text = maker.part(asked) if total is None else maker.rest_of_prompt(total, num_words)
                output = chosen.output_tokens.draw(rng)
                turns.append(Turn(text, output, total, chosen.think_s if i else 0.0, system=system))
            yield Session(tuple(turns), chosen.name)

    def as_json(self) -> dict[str, Any]:
        """The profile as a result tells it."""
        classes = [
            {
                "name": c.name,
                "weight": c.weight,
                "input_tokens_mean": c.input_tokens.mean,
                "output_tokens_mean": c.output_tokens.mean,
                "prefix_groups": c.prefix_groups,
                "prefix_tokens": c.prefix_tokens,
                "turns_mean": c.turns.mean,
            }
            for c in self.classes
        ]
        return {"name": self.name, "classes": classes}


def profile_folder() -> Path:
    """Where the profiles that ship with kvctl lie: in the package, or beside it in a checkout."""
    package = Path(__file__).resolve().parent.parent
    shipped = package / "_profiles" / "workloads"
    return shipped if shipped.is_dir() else package.parent / "profiles" / "workloads"


def load_profile(name_or_path: str) -> WorkloadProfile:
    """Read a shipped profile by name, or a YAML file by path.

    Raises:
        ConfigError: no such profile, or the file is not of the shape above.
    """
    import yaml

    path = profile_folder() / f"{name_or_path}.yaml"
    if name_or_path.endswith((".yaml", ".yml")):
        path = Path(name_or_path)
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError:
        known = ", ".join(sorted(file.stem for file in profile_folder().glob("*.yaml")))
        raise ConfigError(f"no workload {name_or_path!r}", hint=f"There are {known}, or give a .yaml file.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        place = getattr(error, "problem_mark", None)
        where = f":{place.line + 1}" if place is not None else ""
        raise ConfigError(
            f"{path}{where} is not YAML", hint="Its shape is that of profiles/workloads/chat.yaml."
        ) from None
    return parse_profile(document, str(path))


def parse_profile(document: object, where: str) -> WorkloadProfile:
    """Turn a parsed YAML document into a profile.

    Raises:
        ConfigError: naming the place in `where` that is wrong.
    """
    if not isinstance(document, Mapping) or not isinstance(document.get("classes"), list) or not document["classes"]:
        raise ConfigError(f"{where} has no list of classes", hint="Its shape is that of profiles/workloads/chat.yaml.")
    classes = tuple(_parse_class(entry, f"{where}: class {i + 1}") for i, entry in enumerate(document["classes"]))
    return WorkloadProfile(
        str(document.get("name") or Path(where).stem),
        classes,
        str(document.get("description", "")),
        str(document.get("source", "")),
    )


def _parse_class(entry: object, where: str) -> WorkloadClass:
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{where} is not a mapping")
    unknown = set(entry) - _CLASS_FIELDS
    if unknown:
        raise ConfigError(
            f"{where} has an unknown field {sorted(map(str, unknown))[0]!r}",
            hint=f"Fields: {', '.join(sorted(_CLASS_FIELDS))}.",
        )
    for name in ("name", "input_tokens", "output_tokens"):
        if name not in entry:
            raise ConfigError(f"{where} lacks {name!r}")
    prefix = entry.get("shared_prefix") or {}
    turns = {} if entry.get("turns") is None else entry["turns"]
    if not isinstance(prefix, Mapping):
        raise ConfigError(f"{where}: shared_prefix is not a mapping", hint="Write {groups: 4, tokens: 512}.")
    if not isinstance(turns, Mapping):
        turns = {"count": turns}
    try:
        return WorkloadClass(
            name=str(entry["name"]),
            input_tokens=LengthSpec.from_mapping(entry["input_tokens"], f"{where}, input_tokens"),
            output_tokens=LengthSpec.from_mapping(entry["output_tokens"], f"{where}, output_tokens"),
            weight=float(entry.get("weight", 1.0)),
            prefix_groups=int(prefix.get("groups", 1 if prefix else 0)),
            prefix_tokens=int(prefix.get("tokens", 0)),
            turns=LengthSpec.from_mapping(turns.get("count", 1), f"{where}, turns"),
            think_s=parse_seconds(str(turns.get("think", "0"))),
        )
    except (TypeError, ValueError):
        raise ConfigError(f"{where} holds something that is no number") from None
