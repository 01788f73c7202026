"""Every hardware profile: complete, sourced, consistent; and found by the names that people and drivers use."""

from pathlib import Path

import pytest
import yaml

from kvctl.errors import ConfigError, KvctlError
from kvctl.model.hardware import all_hardware, find_hardware, load_hardware
from kvctl.model.profiles import profiles_folder
from kvctl.units import GIB

FILES = sorted((profiles_folder() / "hardware").glob("*.yaml"))


def test_there_are_at_least_43_accelerators() -> None:
    assert len([p for p in all_hardware() if not p.is_cpu]) >= 43


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_a_profile_is_complete_sourced_and_dated(path: Path) -> None:
    raw = yaml.safe_load(path.read_text())
    profile = load_hardware(path)
    assert profile.id == path.stem
    assert profile.as_of.startswith("20")
    assert profile.bandwidth_gb_s > 1
    assert max(profile.tflops.values()) > 0
    assert profile.torch_total_gib <= profile.memory_gb * 1.001  # GiB seen are never more than GB on the box
    sourced = set(raw["sources"])
    needed = {"torch_total_gib", "bandwidth_gb_s"} | {k for k, v in raw["dense_tflops"].items() if v is not None}
    assert needed <= sourced | set(raw["unverified"])
    recalled = {k for k, v in raw["sources"].items() if "UNVERIFIED" in v}
    assert recalled <= profile.unverified


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("h100-sxm", "h100-sxm"),
        ("H100", "h100-sxm"),
        ("a100-80g", "a100-80-sxm"),
        ("l40s", "l40s"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA A100-SXM4-80GB", "a100-80-sxm"),
        ("Tesla T4", "t4"),
        ("rtx_3090", "rtx-3090"),
        ("MI300X", "mi300x"),
        ("GB10", "dgx-spark-gb10"),
    ],
)
def test_names_of_people_and_drivers_are_found(name: str, expected: str) -> None:
    assert find_hardware(name).id == expected


def test_no_two_profiles_answer_to_one_name() -> None:
    names = [name.lower() for p in all_hardware() for name in (p.id, *p.aliases)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("name", ["zork", "", "rtx-9999", "../secrets", "missing.yaml"])
def test_an_unknown_gpu_is_a_usage_error(name: str) -> None:
    with pytest.raises(ConfigError):
        find_hardware(name)


def test_a_users_own_profile_can_be_given_as_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text((profiles_folder() / "hardware" / "l4.yaml").read_text().replace("id: l4", "id: mine"))
    assert find_hardware(str(path)).id == "mine"


@pytest.mark.parametrize("text", ["", "[]", "id: x", "id: [", "a: &a [*a]"])
def test_a_damaged_profile_is_told(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(KvctlError, match=r"bad\.yaml"):
        find_hardware(str(path))


def test_h100_is_seen_as_79_gib_not_80() -> None:
    assert find_hardware("h100").total_bytes == int(79.18 * GIB)


def test_fp8_weights_compute_in_fp8_only_where_the_device_can() -> None:
    assert find_hardware("h100").compute_flops("fp8", "bfloat16") == (1978e12, "fp8")
    assert find_hardware("a100").compute_flops("fp8", "bfloat16") == (312e12, "bf16")
