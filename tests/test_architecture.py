"""The floors hold: imports go down only, the light packages stay light, files stay readable."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FLOORS = {
    "errors": 0, "units": 0, "core": 0, "model": 0, "metrics": 0, "workload": 0,
    "sizing": 1, "sim": 1,
    "engine": 2,
    "server": 3, "bench": 3, "top": 3,
    "cli": 4, "__main__": 5, "__init__": 5,
}  # fmt: skip
TORCH_FREE = {name for name, floor in FLOORS.items() if floor in (0, 1)} | {"bench", "top", "cli"}
HEAVY = {"torch", "numpy", "transformers", "triton", "scipy", "pandas"}
# The engine and the kernels must run on a bare GPU box, without what only the server needs.
SERVER_ONLY = {"fastapi", "uvicorn", "starlette"}
SOURCES = sorted(ROOT.glob("kvctl/**/*.py"))


def unit_of(path: Path) -> str:
    return path.relative_to(ROOT / "kvctl").parts[0].removesuffix(".py")


def imports_of(path: Path) -> set[str]:
    """Every imported module, wherever in the file the import stands, but not those for type checkers only."""
    found = set()
    tree = ast.parse(path.read_text(), str(path))
    typing_only = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if node in typing_only:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write imports in full"
            found.add(node.module or "")
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_every_package_has_a_floor() -> None:
    assert {unit_of(path) for path in SOURCES} <= set(FLOORS)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_down_only(path: Path) -> None:
    unit = unit_of(path)
    for name in imports_of(path):
        parts = name.split(".")
        if parts[0] == "kvctl_kernels":
            assert unit == "engine", f"only the engine calls kernels, not {path}"
        if parts[0] != "kvctl" or len(parts) == 1 or parts[1] not in FLOORS or parts[1] == "__init__":
            continue
        other = parts[1]
        assert FLOORS[other] <= FLOORS[unit], f"{path} imports {name}, which is above it"
        if FLOORS[unit] == 3 and FLOORS[other] == 3:
            assert other == unit, f"{path} imports {name}: server, bench and top do not know each other"
        if unit == "core":
            assert other in {"core", "errors", "units"}, f"{path} imports {name}: the core stands on nothing"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_light_packages_import_nothing_heavy(path: Path) -> None:
    top_level = {name.split(".")[0] for name in imports_of(path)}
    if unit_of(path) in TORCH_FREE:
        assert not top_level & HEAVY, f"{path} must stay light"
    if unit_of(path) in {"engine", "core"}:
        assert not top_level & SERVER_ONLY, f"{path} must run without the server's packages"


def test_kernels_import_nothing_of_kvctl() -> None:
    for path in ROOT.glob("kernels/**/*.py"):
        assert not {name for name in imports_of(path) if name.split(".")[0] == "kvctl"}, path


@pytest.mark.parametrize(
    "module",
    [
        "kvctl",
        "kvctl.cli.app",
        "kvctl.core.engine_core",
        "kvctl.cli.serve",
        "kvctl.cli.size",
        "kvctl.cli.bench",
        "kvctl.cli.top",
    ],
)
def test_importing_a_command_does_not_import_torch(module: str) -> None:
    code = f"import sys, {module}; print([m for m in {sorted(HEAVY)!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


def test_help_names_every_command_and_imports_none_of_them() -> None:
    code = (
        "import sys; sys.argv = ['kvctl', '--help']\n"
        "from kvctl.cli.app import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'textual', 'httpx'}\n"
        "own = [m for m in sys.modules if m.startswith('kvctl.cli.') and m != 'kvctl.cli.app']\n"
        "print(own + [m for m in sys.modules if m.split('.')[0] in heavy])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    for command in ("serve", "size", "bench", "top"):
        assert command in done.stdout
    assert done.stdout.strip().endswith("[]")


def test_files_stay_readable() -> None:
    long = {str(p.relative_to(ROOT)): n for p in SOURCES if (n := len(p.read_text().splitlines())) > 420}
    assert not long, f"split these: {long}"


def test_there_are_no_drawers() -> None:
    assert not [path for path in SOURCES if path.stem in {"utils", "helpers", "common", "misc", "util"}]
