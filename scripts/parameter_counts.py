"""Count the parameters of catalogue models as transformers builds them, for tests/data/sizing/parameter_counts.json.

Builds on the meta device: no memory, no download. Needs the [serve] extra.

    python scripts/parameter_counts.py > tests/data/sizing/parameter_counts.json
"""

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

INNER_TYPES = {"gemma3": "gemma3_text"}  # where the catalogue leaves the language model's type out
FOLDER = Path(__file__).resolve().parent.parent / "profiles" / "models"


def language_model_config(config: dict[str, Any]) -> dict[str, Any]:
    inner = config.get("text_config")
    if not inner:
        return config
    inner = {"model_type": INNER_TYPES.get(config["model_type"], config["model_type"]), **inner}
    if "tie_word_embeddings" in config:  # else the family's own default
        inner["tie_word_embeddings"] = config["tie_word_embeddings"]
    return inner


def count(config: dict[str, Any]) -> int:
    """Parameters once each, and the buffers that a checkpoint stores."""
    fields = {k: v for k, v in config.items() if k not in ("model_type", "quantization_config") and k[0] != "_"}
    if isinstance(fields.get("rope_scaling"), dict):
        fields.pop("rope_scaling")  # shortened in the catalogue; it has no parameters
    built = CONFIG_MAPPING[config["model_type"]](**fields)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(built)
    total = sum({id(p): p.numel() for p in model.parameters()}.values())
    for module in model.modules():
        kept = [
            b for name, b in module._buffers.items() if b is not None and name not in module._non_persistent_buffers_set
        ]
        total += sum(b.numel() for b in kept)
    return total


def main() -> None:
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    counts = {}
    for path in sorted(FOLDER.glob("*/*.json")):
        name = f"{path.parent.name}/{path.stem}"
        config = language_model_config(json.loads(path.read_text()))
        try:
            counts[name] = count(config)
        except Exception as error:  # a family or a shortened config that transformers cannot build: left out
            print(f"{name}: {type(error).__name__}", file=sys.stderr)
    json.dump({"transformers": transformers.__version__, "counts": counts}, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
