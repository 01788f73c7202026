"""Pieces that every page has: style, headline, tables. Floor 3."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

STYLE = """
:root{color-scheme:light dark;--ink:#1b1f24;--soft:#59636e;--page:#fff;--card:#f6f8fa;--edge:#d1d9e0;--good:#1a7f37;
--bad:#b42318;--warn:#8a5a00;--series-1:#0072b2;--series-2:#d55e00;--series-3:#008060;--series-4:#a3478a;
--series-5:#9a6700;--series-6:#3a8fb7}
@media (prefers-color-scheme:dark){:root{--ink:#e6edf3;--soft:#9aa5b1;--page:#0d1117;--card:#161b22;--edge:#30363d;
--good:#57c374;--bad:#ff8a7a;--warn:#e3b341;--series-1:#56b4e9;--series-2:#ff9a57;--series-3:#3fcf9f;
--series-4:#e39fd0;--series-5:#e6b84c;--series-6:#8fd0f0}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1120px;padding:24px 20px 60px;background:var(--page);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
h1{font-size:22px;margin:0 0 4px}h2{font-size:17px;margin:32px 0 10px}p{margin:4px 0}
.soft{color:var(--soft)}
.verdict{border-left:5px solid var(--good);background:var(--card);padding:10px 14px;
margin:16px 0}
.verdict.bad{border-color:var(--bad)}.verdict b{color:var(--good)}
.verdict.bad b{color:var(--bad)}.warn{color:var(--warn)}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(160px,1fr));gap:10px;margin:16px 0}
.tile{background:var(--card);border:1px solid var(--edge);border-radius:6px;padding:10px 12px}
.tile .n{font-size:21px;font-weight:600;font-variant-numeric:tabular-nums}.tile .l{color:var(--soft);font-size:13px}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,480px),1fr));gap:16px}
.scroll{overflow-x:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums;min-width:60%}
th,td{padding:4px 12px 4px 0;text-align:right;border-bottom:1px solid var(--edge);white-space:nowrap}
th:first-child,td:first-child{text-align:left}th{color:var(--soft);font-weight:500}
svg.plot{width:100%;height:auto;background:var(--card);border:1px solid var(--edge);border-radius:6px}
svg text{fill:var(--ink);font:12px system-ui,sans-serif}svg .title{font-weight:600;font-size:13px}
svg .tick,svg .label{fill:var(--soft)}svg .grid{stroke:var(--edge);stroke-width:.7}
svg .line{fill:none;stroke-width:1.8;stroke-linejoin:round}svg .dashed{stroke-dasharray:5 4}
svg .limit{stroke:var(--bad);stroke-width:1.3;stroke-dasharray:3 3}svg .limit-label{fill:var(--bad)}
svg .s1{stroke:var(--series-1)}svg .s2{stroke:var(--series-2)}svg .s3{stroke:var(--series-3)}
svg .s4{stroke:var(--series-4)}svg .s5{stroke:var(--series-5)}svg .s6{stroke:var(--series-6)}
svg .dot{fill:var(--card);stroke-width:2}
dl{display:grid;grid-template-columns:max-content 1fr;gap:4px 16px}dt{font-weight:600}dd{margin:0;color:var(--soft)}
summary{cursor:pointer;font-weight:600}code{background:var(--card);padding:1px 5px;border-radius:4px}
@media (max-width:640px){dl{grid-template-columns:1fr}dd{margin-bottom:6px}}
"""


def head(config: Mapping[str, Any], load: str) -> str:
    """The model, and one line of what was run where."""
    return (
        f"<h1>{escape(str(config['model']))}</h1>"
        f'<p class="soft">{escape(config["url"])}{escape(config["endpoint"])} · {escape(load)} · '
        f"{escape(str(config['workload']['name']))} · {escape(config['date'])} · "
        f"kvctl {escape(config['kvctl_version'])} · seed {config['load']['seed']}</p>"
    )


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of plain texts."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header) if any(header) else ""
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    top = f"<thead><tr>{head}</tr></thead>" if head else ""
    return f'<div class="scroll"><table>{top}<tbody>{body}</tbody></table></div>'
