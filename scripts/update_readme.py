"""Write the generated parts of README.md, or say with --check whether they are current.

Each part stands between `<!-- begin NAME -->` and `<!-- end NAME -->` and is made from what the code says: the metrics
table from kvctl/metrics/definitions.py, the models from kvctl/engine/models, the accuracy of `kvctl size` by running
scripts/size_accuracy.py.
"""

import argparse
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def metrics_table() -> str:
    """One row for each family of /metrics."""
    from kvctl.metrics.definitions import metrics_table_markdown

    return metrics_table_markdown().rstrip()


def models_table() -> str:
    """One row for each architecture, with the first line of what its reader says about itself."""
    from kvctl.engine.gguf_config import SUPPORTED
    from kvctl.engine.models import registry

    gguf = {class_name: name for name, (class_name, _) in SUPPORTED.items()}
    rows = ["| architecture in config.json | models | .gguf name |", "| --- | --- | --- |"]
    for name in registry.SUPPORTED_ARCHITECTURES:
        text = (registry._FAMILIES[name].__doc__ or "").strip().splitlines()[0].rstrip(".")
        rows.append(f"| `{name}` | {_cell(text)} | {f'`{gguf[name]}`' if name in gguf else ''} |")
    return "\n".join(rows)


def size_accuracy() -> str:
    """The tables of scripts/size_accuracy.py, its headings as bold lines."""
    script = Path(__file__).parent / "size_accuracy.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    return re.sub(r"^## (.*)$", r"**\1**", done.stdout.strip(), flags=re.MULTILINE)


PARTS: dict[str, Callable[[], str]] = {"metrics": metrics_table, "models": models_table, "size accuracy": size_accuracy}


def updated(text: str) -> str:
    """Return README's text with each generated part made anew.

    Raises:
        SystemExit: a part's marks are missing.
    """
    for name, make in PARTS.items():
        pattern = re.compile(rf"(<!-- begin {name} -->\n).*?(<!-- end {name} -->)", re.DOTALL)
        if not pattern.search(text):
            sys.exit(f"update_readme: {README.name} has no part <!-- begin {name} --> ... <!-- end {name} -->")
        content = make()
        text = pattern.sub(lambda match, content=content: f"{match[1]}{content}\n{match[2]}", text)
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 if something is out of date")
    options = parser.parse_args()
    old = README.read_text(encoding="utf-8")
    new = updated(old)
    if options.check:
        if new != old:
            print("README.md is out of date: run scripts/update_readme.py", file=sys.stderr)
        return int(new != old)
    README.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
