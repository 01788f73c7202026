"""`kvctl top`: options in, a page, an object or the dashboard out. Everything else is in `kvctl.top`. Floor 4."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

_KEY_VARIABLES = ("KVCTL_API_KEY", "VLLM_API_KEY", "OPENAI_API_KEY")
_EXIT_INTERRUPTED = 130
_REQUEST, _SESSION, _LOOK = "How to ask", "Recordings and the demo", "How it looks"


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("top")(top)


def top(
    urls: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[URL]...",
            help="Servers to watch: host:port, or the address of a metrics page. Default: 127.0.0.1:8000.",
            show_default=False,
        ),
    ] = None,
    once: Annotated[
        bool, typer.Option("--once", "-1", help="Two scrapes --interval apart, one page of text, done.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --once: an object for programs, verdict included.")] = (
        False
    ),
    interval: Annotated[str, typer.Option(metavar="TIME", help="Time between two scrapes.")] = "1s",
    window: Annotated[
        str, typer.Option(metavar="TIME", help="Window of rates and quantiles on the screen: 5s, 15s or 60s.")
    ] = "15s",
    summed: Annotated[
        bool, typer.Option("--sum", help="Show the engines of one server (data parallel) as one.")
    ] = False,
    header: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HEADER",
            help="Extra header, 'Name: value'. May be repeated.",
            show_default=False,
            rich_help_panel=_REQUEST,
        ),
    ] = None,
    api_key: Annotated[
        bool,
        typer.Option(
            "--api-key",
            help="Send the key in KVCTL_API_KEY (else VLLM_API_KEY, OPENAI_API_KEY) as a bearer token.",
            rich_help_panel=_REQUEST,
        ),
    ] = False,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Accept any TLS certificate.", rich_help_panel=_REQUEST)
    ] = False,
    timeout: Annotated[
        str, typer.Option(metavar="TIME", help="Longest wait for one page.", rich_help_panel=_REQUEST)
    ] = "5s",
    record: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write every page to this file (.gz: compressed) for --replay.",
            rich_help_panel=_SESSION,
        ),
    ] = None,
    replay: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Show a recorded session instead of a server.", rich_help_panel=_SESSION),
    ] = None,
    speed: Annotated[
        float, typer.Option(metavar="FACTOR", help="Replay so many times as fast.", rich_help_panel=_SESSION)
    ] = 1.0,
    demo: Annotated[
        bool, typer.Option("--demo", help="Three servers that exist only as numbers.", rich_help_panel=_SESSION)
    ] = False,
    ascii_only: Annotated[
        bool, typer.Option("--ascii", "-U", help="Plain ASCII characters only.", rich_help_panel=_LOOK)
    ] = False,
    blocks: Annotated[
        bool, typer.Option("--blocks", help="Block characters instead of braille dots.", rich_help_panel=_LOOK)
    ] = False,
    light: Annotated[
        bool, typer.Option("--light", help="Colours for a light terminal.", rich_help_panel=_LOOK)
    ] = False,
    no_color: Annotated[
        bool, typer.Option("--no-color", help="No colours; NO_COLOR=1 does the same.", rich_help_panel=_LOOK)
    ] = False,
) -> None:
    """Watch running servers: which limit binds, and what to change.

    Reads the metrics page of kvctl, vLLM, SGLang, TGI, llama.cpp or TensorRT-LLM. Writes nothing to the server.

    With --once the exit code is 0 healthy or idle, 10 a limit binds, 3 cannot tell, 1 unreachable.
    """
    from kvctl.top.settings import make_settings

    settings = make_settings(
        urls=urls or [],
        interval=interval,
        window=window,
        summed=summed,
        headers=header or [],
        api_key=next((os.environ[name] for name in _KEY_VARIABLES if os.environ.get(name)), None) if api_key else None,
        wants_api_key=api_key,
        insecure=insecure,
        timeout=timeout,
        record=record,
        replay=replay,
        speed=speed,
        demo=demo,
        once=once,
        as_json=as_json,
    )
    from kvctl.top.terminal import choose_look

    plain = no_color or bool(os.environ.get("NO_COLOR"))
    look = choose_look(ascii_only=ascii_only, blocks=blocks, light=light, plain=plain, encoding=sys.stdout.encoding)
    try:
        if once:
            from kvctl.top.run_once import run_once

            code = run_once(settings, look, as_json=as_json)
        else:
            from kvctl.top.run_app import run_app

            code = run_app(settings, look)
    except KeyboardInterrupt:
        code = _EXIT_INTERRUPTED
    if code:
        raise typer.Exit(code)
