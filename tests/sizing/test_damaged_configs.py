"""A config with any field damaged is answered, refused or told in a line: never a traceback, never NaN in JSON."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from kvctl.errors import KvctlError
from kvctl.model.hardware import find_hardware
from kvctl.model.model_shape import ModelShape
from kvctl.model.profiles import profiles_folder
from kvctl.sizing.advice import advise
from kvctl.sizing.json_report import answer_json
from kvctl.sizing.request import SizedModel, SizeRequest, size_up
from kvctl.sizing.speed import SpeedModel

FILES = sorted((profiles_folder() / "models").glob("*/*.json"))
ENGINES = ("kvctl", "vllm", "vllm@0.11", "vllm@0.7", "vllm@0.6", "sglang", "llama.cpp", "trtllm", "ideal")
DAMAGE: tuple[Any, ...] = (
    None, 0, -1, "x", "", [], {}, [1], ["full_attention"], {"a": 1}, 1e300, float("nan"), True, 10**15, 3, 7, 2.5,
)  # fmt: skip


def damaged(path: Path, rng: random.Random) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(path.read_text())
    fields = config["text_config"] if "text_config" in config and rng.random() < 0.6 else config
    for name in rng.sample(sorted(fields), rng.choice((1, 1, 2)) if len(fields) > 1 else 1):
        if rng.random() < 0.15:
            del fields[name]
        else:
            fields[name] = rng.choice(DAMAGE)
    return config


@pytest.mark.parametrize("seed", range(8))
def test_damage_never_ends_in_a_traceback(seed: int) -> None:
    rng = random.Random(seed)
    hardware = find_hardware("h100")
    answered = refused = 0
    for _ in range(120):
        config = damaged(rng.choice(FILES), rng)
        try:
            shape = ModelShape.from_config(config)
            request = SizeRequest(SizedModel("m", shape, "test"), rng.choice(ENGINES), hardware=hardware)
            answer = size_up(request)
            speed = None
            if answer.weights is not None and answer.weights.active_parameters:
                model = SpeedModel(shape, answer.specs, answer.weights, hardware, request.parallel, answer.dtype)
                speed = model.report(1000, (1, 64), 2000)
            json.dumps(answer_json(answer, speed, advise(answer)), allow_nan=False)
            answered += 1
        except KvctlError as error:
            assert "\n" not in error.message
            refused += 1
    assert answered > 10 and refused > 10
