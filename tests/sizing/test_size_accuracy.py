"""Printed server logs: every number that follows from a rule must be ours; each that is off is named and explained."""

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
spec = importlib.util.spec_from_file_location("size_accuracy", ROOT / "scripts" / "size_accuracy.py")
assert spec is not None and spec.loader is not None
accuracy = importlib.util.module_from_spec(spec)
sys.modules["size_accuracy"] = accuracy
spec.loader.exec_module(accuracy)

CASES = accuracy.Cases(accuracy.DATA / "server_logs.yaml", accuracy.DATA / "case_models.yaml")
CHECKS, LEFT_OUT = accuracy.rule_checks(CASES)
# Cases whose printed numbers are not reproduced, each with its reason in scripts/size_accuracy.py.
OFF = {"glm51-rocm-err"}
NOT_ASKED = {
    "vllm-13596",  # no model named
    "vllm-16128-mistral31-awq",  # no tensor-parallel size and no config
    "vllm-54458-flashnext-262k-fp8",  # no config known
    "llm-scaler-647",  # no config and no block size known
    "dsv4-flash-1m",  # how compressed layers are packed is not pinned
}


@pytest.mark.parametrize("check", [c for c in CHECKS if c.case not in OFF], ids=lambda c: f"{c.case}-{c.what}")
def test_a_printed_number_is_ours(check) -> None:
    assert check.low <= check.observed <= check.high


def test_bytes_per_token_are_equal_as_integers_wherever_they_are_pinned() -> None:
    mine = [c for c in CHECKS if c.what == "bytes/token"]
    assert len(mine) >= 62
    assert all(c.low == c.high == c.observed for c in mine)


def test_only_the_named_cases_are_off_and_each_has_a_reason() -> None:
    assert {c.case for c in CHECKS if not c.holds} == OFF
    assert set(accuracy.EXPLAINED) >= OFF
    assert set(LEFT_OUT) == NOT_ASKED


def test_97_percent_of_the_cases_hold_in_every_number() -> None:
    cases = {c.case for c in CHECKS}
    assert len(cases) >= 70
    assert 1 - len(OFF & cases) / len(cases) >= 0.97


def test_kv_memory_from_the_profile_alone_is_within_four_percent_in_the_median() -> None:
    checks, left_out = accuracy.memory_checks(CASES)
    assert not left_out
    assert len(checks) >= 12
    median, covered = accuracy.summary(checks)
    assert median <= 0.04
    assert covered >= 0.9


def test_a_calibration_from_one_log_predicts_another_of_the_machine_within_one_and_a_half_percent() -> None:
    checks = accuracy.calibrated_checks(CASES)
    assert len(checks) >= 2
    assert accuracy.summary(checks)[0] <= 0.015


def test_the_script_prints_its_tables_and_succeeds(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["size_accuracy.py"])
    assert accuracy.main() == 0
    printed = capsys.readouterr().out
    assert "KV memory from the GPU profile alone" in printed
    assert "NOT EXPLAINED" not in printed
