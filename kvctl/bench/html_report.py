"""One page for a run, a sweep or a search: figures, plots, definitions. Opens offline, light and dark, prints well.

Renders result objects; measures nothing. No script, no font, no address of anything outside the page. Floor 3.
"""

from collections.abc import Mapping
from html import escape
from typing import Any

from kvctl.bench.html_parts import STYLE
from kvctl.bench.html_run import run_page
from kvctl.bench.html_search import search_page


def render_html(result: Mapping[str, Any]) -> str:
    """The page for a result of one run, or of a sweep or search."""
    body = run_page(result) if "summary" in result else search_page(result)
    run = result if "summary" in result else result["points"][0]["results"][0]
    title = f"kvctl bench: {run['config']['model']}"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>{body}{_definitions(result)}</body></html>\n"
    )


def _definitions(result: Mapping[str, Any]) -> str:
    items = "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in result["definitions"].items())
    return f"<h2>Definitions</h2><details><summary>What each number means</summary><dl>{items}</dl></details>"
