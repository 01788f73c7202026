"""What `?` shows: the keys and how to read the numbers. Pure. Floor 3."""

from rich.text import Text

from kvctl.top.lines import line, wrapped
from kvctl.top.look import Look

KEYS = (
    ("q  Ctrl-C", "quit"),
    ("?  h", "this help"),
    ("e", "explain the verdict: what it means, why, and every advice"),
    ("w", "window of rates and quantiles: 5, 15, 60 s"),
    ("+  -", "ask more or less often"),
    ("space  p", "pause and go on"),
    ("Up Down  j k", "select an engine"),
    ("Enter", "details of the selected engine; again or Esc: back"),
    ("1 .. 9", "select an engine; with one engine or in details: one panel large"),
    ("s", "sort the table by name, verdict, waiting, KV, output"),
    ("/", "filter the table by address, model, server or verdict"),
    ("a", "engines of one server together or apart"),
    ("r", "draw the screen anew"),
)
READING = (
    "Rates and means are differences over the window; '-' means that the server does not say, never 0.",
    "p50 and p99 are the bucket that holds the quantile: '100 .. 250 ms' is all the server knows. '< 300 ms' is the "
    "first bucket, '>= 2560 s' lies above the last one. The mean is exact.",
    "'between' counts one gap per delivery, 'per token' one mean per finished request.",
    "'room for' is the free part of the KV cache in requests of the size seen: finished in the window, else since the "
    "start, else what each running request holds now.",
    "The verdict looks at the last 10 s at most, and only at the part with a queue or without one.",
    "'sure', 'likely' and 'possible' say how well the numbers tell this limit from the others.",
    "STALE: the endpoint does not answer; the numbers are its last ones.",
)


def help_lines(width: int, look: Look) -> list[Text]:
    """Return the help page."""
    p = look.palette
    lines = [Text("Keys", style=p.calm)]
    for keys, what in KEYS:
        lines.append(line((f"  {keys:<14}", p.value), (what, p.label), width=width, look=look))
    lines += [Text(""), Text("Reading the numbers", style=p.calm)]
    for sentence in READING:
        lines += wrapped(sentence, p.label, width, first=f"  {look.dot} ", rest="    ")
    return lines
