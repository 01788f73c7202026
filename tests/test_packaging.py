"""What a user installs: the wheel's contents, the folders it is made from, and what importing it pulls in."""

import json
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
HEAVY = ("torch", "numpy", "transformers", "fastapi", "scipy", "pandas", "triton")


def run_python(code: str, *arguments: str) -> str:
    """Run code in a process of its own, at the repository's root, as `python -c` there would."""
    result = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from a copy of the sources, without the network: setuptools is installed."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    for name in ("kvctl", "kernels", "profiles", "tests", "scripts"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    result = subprocess.run(
        [*command, "--wheel-dir", str(folder), str(source)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return next(folder.glob("*.whl"))


def test_the_wheel_holds_two_packages_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    info = next(top for top in tops if top.endswith(".dist-info"))
    assert tops == {"kvctl", "kvctl_kernels", info}
    assert f"{info}/licenses/LICENSE" in names


def test_the_wheel_holds_every_module_profile_and_source_of_a_kernel(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    copy = wheel.parent / "source"  # what it was built from
    expected = {
        f"{target}/{path.relative_to(copy / source).as_posix()}"
        for source, target, kinds in (
            ("kvctl", "kvctl", {".py", ".typed"}),
            ("kernels/kvctl_kernels", "kvctl_kernels", {".py", ".cpp", ".h"}),
            ("profiles", "kvctl/_profiles", {".yaml", ".json"}),
        )
        for path in (copy / source).rglob("*")
        if path.suffix in kinds or path.name == "py.typed"
    }
    assert len(expected) > 50
    missing = sorted(expected - names)
    assert missing == []
    assert any(name.startswith("kvctl/_profiles/hardware/") for name in names)


def test_the_installed_wheel_works_outside_the_checkout(wheel: Path, tmp_path: Path) -> None:
    """Only the wheel's own files are on the path in front of the libraries: no checkout, no import hook of it."""
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    code = (
        "import sys; sys.meta_path = [f for f in sys.meta_path if 'editable' not in repr(f).lower()]\n"
        f"sys.path.insert(0, {str(tmp_path / 'site')!r})\n"
        "import kvctl, kvctl_kernels, importlib.util\n"
        "print(kvctl.__file__, kvctl_kernels.__file__, importlib.util.find_spec('kernels'))"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    site = tmp_path / "site"
    assert result.stdout.split() == [
        str(site / "kvctl" / "__init__.py"), str(site / "kvctl_kernels" / "__init__.py"), "None",
    ]  # fmt: skip


def test_the_list_of_packages_is_the_list_of_folders() -> None:
    folders = {"kvctl._profiles"}
    for root, base in (("kvctl", ROOT), ("kvctl_kernels", ROOT / "kernels")):
        for folder in [base / root, *(base / root).rglob("*")]:
            if folder.is_dir() and folder.name != "__pycache__" and any(folder.glob("*.py")):
                folders.add(".".join(folder.relative_to(base).parts))
    assert sorted(PYPROJECT["tool"]["setuptools"]["packages"]) == sorted(folders)


def test_every_package_has_an_init_file() -> None:
    for name in PYPROJECT["tool"]["setuptools"]["packages"]:
        if name != "kvctl._profiles":
            folder = ROOT / ("kernels" if name.startswith("kvctl_kernels") else "") / name.replace(".", "/")
            assert (folder / "__init__.py").is_file(), name


def test_the_folder_kernels_is_no_package() -> None:
    """transformers looks for a module named `kernels`; a package of that name in the checkout would break it."""
    assert list((ROOT / "kernels").glob("*.py")) == []


def test_transformers_is_not_fooled_by_the_folder_kernels() -> None:
    code = (
        "import sys; sys.path.insert(0, '.')\n"
        "from transformers.utils.import_utils import is_kernels_available\n"
        "from transformers import AutoModelForCausalLM\n"
        "import importlib.metadata as m\n"
        "installed = any(d.metadata['Name'] == 'kernels' for d in m.distributions())\n"
        "print(is_kernels_available() or False, installed)"
    )
    available, installed = run_python(code).split("\n")[-1].split()
    assert available == "False" or installed == "True"


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["serve", "--help"]], ids=" ".join)
def test_help_is_printed_without_torch(arguments: list[str]) -> None:
    code = (
        "import sys, contextlib, io, json\n"
        "from kvctl.cli.app import main\n"
        "sys.argv = ['kvctl', *sys.argv[1:]]\n"
        "out = io.StringIO()\n"
        "with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):\n    main()\n"
        f"print(json.dumps([len(out.getvalue()), [m for m in {HEAVY} if m in sys.modules]]))"
    )
    length, heavy = json.loads(run_python(code, *arguments))
    assert length > 5
    assert heavy == []


def test_the_base_install_needs_nothing_of_the_engine() -> None:
    """`pip install kvctl` is for size, bench and top on any laptop."""
    names = " ".join(PYPROJECT["project"]["dependencies"])
    assert not any(heavy in names for heavy in HEAVY)


def test_the_pinned_versions_cover_every_requirement() -> None:
    pins = {
        line.split("==")[0]
        for line in (ROOT / "scripts" / "constraints.txt").read_text(encoding="utf-8").splitlines()
        if not line.startswith("#")
    }
    project = PYPROJECT["project"]
    wanted = [*project["dependencies"], *(r for extra in project["optional-dependencies"].values() for r in extra)]
    names = {_name(requirement) for requirement in wanted} - {"setuptools", "wheel", "triton"}
    assert names - pins == set()
    assert "torch" in pins


def _name(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match is not None
    return match[0].lower().replace("_", "-")
