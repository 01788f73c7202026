"""`kvctl bench`: options in; tables, files and an exit code out. `compare` and `mock` are its subcommands. Floor 4.

Everything else is in `kvctl.bench`. Imports of the load path sit inside the functions, so that --help is quick.
"""

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

_KEY_VARIABLES = ("KVCTL_API_KEY", "VLLM_API_KEY", "OPENAI_API_KEY")
_SUBCOMMANDS = ("compare", "mock", "run")
_EXIT_INTERRUPTED = 130
_RUN_HELP = (
    "Measure an OpenAI-compatible server, and the measurement's own error.\n\n"
    "Streams requests in a closed loop (--concurrency) or an open one (--rate) and prints latencies, throughput, "
    "what limited the server, and whether this client was fit to tell. Exit code: 0 valid, 1 nothing completed, "
    "5 too many errors, 6 the client was the limit, 130 interrupted."
)
_LOAD, _WORKLOAD, _REQUEST = "Load", "Workload", "Request"
_SEARCH, _OUTPUT, _TRUST, _SERVER = "SLO and search", "Output", "Trust", "Server"


class _RunByDefault(TyperGroup):
    """`kvctl bench URL` and `kvctl bench --rate 5` mean `kvctl bench run ...`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or args[0] not in _SUBCOMMANDS:
            args = ["run", *args]
        return super().parse_args(ctx, args)


def register(app: typer.Typer) -> None:
    """Add the command and its subcommands to the application."""
    group = typer.Typer(cls=_RunByDefault, rich_markup_mode="rich", pretty_exceptions_enable=False)
    group.command(
        "run", help=_RUN_HELP, epilog="Also: kvctl bench compare A.json B.json; kvctl bench mock (a scripted server)."
    )(run)
    group.command("compare")(compare)
    group.command("mock")(mock)
    app.add_typer(group, name="bench", help="Measure an OpenAI-compatible server, and the measurement's own error.")


def run(
    url: Annotated[
        str | None,
        typer.Argument(metavar="URL", help="The server. Default: http://127.0.0.1:8000.", show_default=False),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Default: the first that /v1/models names.", show_default=False, rich_help_panel=_REQUEST),
    ] = None,
    endpoint: Annotated[str, typer.Option(help="completions or chat.", rich_help_panel=_REQUEST)] = "completions",
    api_key: Annotated[
        bool,
        typer.Option(
            "--api-key",
            help="Send the key in KVCTL_API_KEY (else VLLM_API_KEY, OPENAI_API_KEY) as a bearer token.",
            rich_help_panel=_REQUEST,
        ),
    ] = False,
    header: Annotated[
        list[str] | None,
        typer.Option(
            help="Extra header, 'Name: value'. May be repeated.", show_default=False, rich_help_panel=_REQUEST
        ),
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Accept any TLS certificate.", rich_help_panel=_REQUEST)
    ] = False,
    timeout: Annotated[str, typer.Option(help="Longest wait for one answer.", rich_help_panel=_REQUEST)] = "600s",
    new_connections: Annotated[
        bool, typer.Option("--new-connections", help="A connection per request.", rich_help_panel=_REQUEST)
    ] = False,
    concurrency: Annotated[
        int | None,
        typer.Option(
            "--concurrency",
            "-c",
            help="Closed loop: so many at once. Default: 16.",
            show_default=False,
            rich_help_panel=_LOAD,
        ),
    ] = None,
    rate: Annotated[
        str | None,
        typer.Option(
            "--rate",
            "-r",
            help="Open loop, requests/s: 5, 1@10s,2@10s (steps), 1..20@60s (ramp), 20@2s,0@8s,... (bursts).",
            show_default=False,
            rich_help_panel=_LOAD,
        ),
    ] = None,
    arrivals: Annotated[str, typer.Option(help="constant, poisson or gamma.", rich_help_panel=_LOAD)] = "poisson",
    burstiness: Annotated[
        float, typer.Option(help="Gamma shape of the gaps: 1 is Poisson, below 1 burstier.", rich_help_panel=_LOAD)
    ] = 1.0,
    max_in_flight: Annotated[
        int | None,
        typer.Option(help="Open loop: what is due beyond this waits here.", show_default=False, rich_help_panel=_LOAD),
    ] = None,
    duration: Annotated[
        str | None,
        typer.Option(
            "--duration", "-d", help="Default: 30s (searches: 10s each).", show_default=False, rich_help_panel=_LOAD
        ),
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option("--requests", "-n", help="Or so many requests.", show_default=False, rich_help_panel=_LOAD),
    ] = None,
    warmup: Annotated[int, typer.Option(help="Requests before the measured ones.", rich_help_panel=_LOAD)] = 0,
    ramp: Annotated[
        str | None,
        typer.Option(
            help="Closed loop: streams start over this. Default: 4 ms each.", show_default=False, rich_help_panel=_LOAD
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            help="Same seed, same requests (and a warm cache). Default: another each run.",
            show_default=False,
            rich_help_panel=_LOAD,
        ),
    ] = None,
    workers: Annotated[int, typer.Option(help="Client processes.", rich_help_panel=_LOAD)] = 1,
    workload: Annotated[
        str | None,
        typer.Option(
            "--workload",
            "-w",
            help="chat, rag, agent, code, batch, or a .yaml file.",
            show_default=False,
            rich_help_panel=_WORKLOAD,
        ),
    ] = None,
    input_tokens: Annotated[
        str | None,
        typer.Option(help="512, 256..768 or 512+-128. Default: 512.", show_default=False, rich_help_panel=_WORKLOAD),
    ] = None,
    output_tokens: Annotated[
        str | None, typer.Option(help="The same. Default: 128.", show_default=False, rich_help_panel=_WORKLOAD)
    ] = None,
    shared_prefix: Annotated[
        str | None,
        typer.Option(
            help="Tokens shared by all, or GROUPSxTOKENS, e.g. 8x512.", show_default=False, rich_help_panel=_WORKLOAD
        ),
    ] = None,
    turns: Annotated[
        str | None,
        typer.Option(help="Turns of a session, e.g. 3 or 1..5.", show_default=False, rich_help_panel=_WORKLOAD),
    ] = None,
    think: Annotated[str, typer.Option(help="Pause before each further turn.", rich_help_panel=_WORKLOAD)] = "0s",
    dataset: Annotated[
        Path | None,
        typer.Option(
            help="ShareGPT JSON, JSONL, Mooncake JSONL, Azure or BurstGPT CSV.",
            show_default=False,
            rich_help_panel=_WORKLOAD,
        ),
    ] = None,
    dataset_format: Annotated[
        str, typer.Option(help="auto, sharegpt, jsonl, mooncake, azure, burstgpt.", rich_help_panel=_WORKLOAD)
    ] = "auto",
    speedup: Annotated[
        float | None,
        typer.Option(help="Replay a trace so many times as fast.", show_default=False, rich_help_panel=_WORKLOAD),
    ] = None,
    cache_bust: Annotated[
        bool, typer.Option("--cache-bust", help="No prompt begins like another.", rich_help_panel=_WORKLOAD)
    ] = False,
    respect_eos: Annotated[
        bool, typer.Option("--respect-eos", help="Let answers end by themselves.", rich_help_panel=_REQUEST)
    ] = False,
    temperature: Annotated[
        float, typer.Option(help="0 is greedy; negative: leave it to the server.", rich_help_panel=_REQUEST)
    ] = 0.0,
    extra_body: Annotated[
        str | None,
        typer.Option(help="JSON object put into every request.", show_default=False, rich_help_panel=_REQUEST),
    ] = None,
    continuous_usage: Annotated[
        bool, typer.Option("--continuous-usage", help="Ask for usage in every event.", rich_help_panel=_REQUEST)
    ] = False,
    slo: Annotated[
        str | None,
        typer.Option(
            help="ttft=500ms,tpot=50ms[,e2e=5s]: reports goodput.", show_default=False, rich_help_panel=_SEARCH
        ),
    ] = None,
    sweep: Annotated[
        str | None,
        typer.Option(help="concurrency=1,2,4,... or rate=1,2,5.", show_default=False, rich_help_panel=_SEARCH),
    ] = None,
    find: Annotated[
        str | None, typer.Option(help="max-rate (needs --slo) or knee.", show_default=False, rich_help_panel=_SEARCH)
    ] = None,
    slo_share: Annotated[
        float, typer.Option(help="Share of requests that must keep the SLO.", rich_help_panel=_SEARCH)
    ] = 0.95,
    repeats: Annotated[int, typer.Option(help="Runs per point of a sweep or search.", rich_help_panel=_SEARCH)] = 1,
    max_error_rate: Annotated[
        float, typer.Option(help="Stop, with exit code 5, above this share of failures.", rich_help_panel=_TRUST)
    ] = 0.5,
    no_calibrate: Annotated[
        bool, typer.Option("--no-calibrate", help="Skip the two seconds of self-calibration.", rich_help_panel=_TRUST)
    ] = False,
    metrics_url: Annotated[
        str | None, typer.Option(help="Default: /metrics of the server.", show_default=False, rich_help_panel=_SERVER)
    ] = None,
    no_metrics: Annotated[bool, typer.Option("--no-metrics", help="Do not read it.", rich_help_panel=_SERVER)] = False,
    gpu: Annotated[
        str | None,
        typer.Option(
            help="Compare with what this hardware could do (names as in kvctl size).",
            show_default=False,
            rich_help_panel=_SERVER,
        ),
    ] = None,
    gpu_model: Annotated[
        str | None,
        typer.Option(
            help="With --gpu: the model, as kvctl size takes it.", show_default=False, rich_help_panel=_SERVER
        ),
    ] = None,
    num_gpus: Annotated[int, typer.Option(help="With --gpu: how many.", rich_help_panel=_SERVER)] = 1,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", help="Write the result; - is stdout.", show_default=False, rich_help_panel=_OUTPUT),
    ] = None,
    csv_file: Annotated[
        Path | None, typer.Option("--csv", help="One line per run.", show_default=False, rich_help_panel=_OUTPUT)
    ] = None,
    html_file: Annotated[
        Path | None,
        typer.Option("--html", help="One page with plots; opens offline.", show_default=False, rich_help_panel=_OUTPUT),
    ] = None,
    records: Annotated[
        bool, typer.Option("--records", help="Every request and event time into the JSON.", rich_help_panel=_OUTPUT)
    ] = False,
    json_format: Annotated[
        str, typer.Option("--format", help="Field names of --json: kvctl or vllm.", rich_help_panel=_OUTPUT)
    ] = "kvctl",
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="No progress, no tables.", rich_help_panel=_OUTPUT)
    ] = False,
) -> None:
    """Run a load, a sweep or a search; see `_RUN_HELP`."""
    given = dict(locals())  # first, while it holds the options and nothing else
    from kvctl.bench.command import OutputOptions, run_bench
    from kvctl.bench.settings import BenchOptions

    outputs = {name: given.pop(name) for name in OutputOptions.names()}
    given["header"] = header or []
    given["api_key"] = _key_from_environment() if api_key else None
    given["temperature"] = temperature if temperature >= 0 else None
    given["is_search"] = sweep is not None or find is not None
    try:
        code = run_bench(BenchOptions(**given), OutputOptions(**outputs))
    except KeyboardInterrupt:
        code = _EXIT_INTERRUPTED
    if code:
        sys.exit(code)


def _key_from_environment() -> str:
    from kvctl.errors import ConfigError

    for name in _KEY_VARIABLES:
        if os.environ.get(name):
            return os.environ[name]
    raise ConfigError("--api-key finds no key", hint=f"Set {_KEY_VARIABLES[0]} (or {', '.join(_KEY_VARIABLES[1:])}).")


def compare(
    before: Annotated[Path, typer.Argument(help="A result of kvctl bench --json.")],
    after: Annotated[Path, typer.Argument(help="The one to compare with it.")],
    fail_if: Annotated[
        list[str] | None,
        typer.Option(help='Exit with 5 if, e.g. "ttft_p99>+10%" or "output_throughput<-5%".', show_default=False),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the comparison; - is stdout.", show_default=False)
    ] = None,
) -> None:
    """Compare two results, with confidence intervals and an exit code for CI."""
    from kvctl.bench.command import run_compare

    code = run_compare(before, after, fail_if or [], json_file)
    if code:
        sys.exit(code)


def mock(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0: any free port.")] = 8000,
    ttft: Annotated[str, typer.Option(help="Time to the first token.")] = "50ms",
    gap: Annotated[str, typer.Option(help="Time per further token.")] = "10ms",
    tokens: Annotated[int, typer.Option(help="Tokens per answer; 0: as many as max_tokens asks for.")] = 32,
    tokens_per_event: Annotated[int, typer.Option(help="Tokens in each event.")] = 1,
    no_role_delta: Annotated[bool, typer.Option("--no-role-delta", help="Chat: no empty first event.")] = False,
    no_finish_delta: Annotated[
        bool, typer.Option("--no-finish-delta", help="No event with the finish reason.")
    ] = False,
    reasoning_tokens: Annotated[int, typer.Option(help="Chat: so many tokens of reasoning first.")] = 0,
    no_usage: Annotated[bool, typer.Option("--no-usage", help="Never tell usage.")] = False,
    event_bytes: Annotated[int, typer.Option(help="Pad the text of each event to this.")] = 0,
    trickle_bytes: Annotated[int, typer.Option(help="Write in pieces of so many bytes, 1 ms apart.")] = 0,
    fault: Annotated[
        str | None, typer.Option(help="error, cut, 429, 503, 500, html or hang.", show_default=False)
    ] = None,
    fault_share: Annotated[float, typer.Option(help="Share of requests that meet it.")] = 1.0,
    fault_after_tokens: Annotated[int, typer.Option(help="error, cut: after so many tokens.")] = 4,
    retry_after: Annotated[float, typer.Option(help="429, 503: seconds; negative: no such header.")] = 1.0,
    slots: Annotated[int, typer.Option(help="Streams at once, others wait; 0: no limit.")] = 0,
    tokens_per_word: Annotated[float, typer.Option(help="How prompts are counted.")] = 1.0,
    prompt_overhead: Annotated[int, typer.Option(help="Tokens that a chat template adds.")] = 0,
    prefix_cache: Annotated[bool, typer.Option("--prefix-cache", help="Pretend to have one.")] = False,
    model: Annotated[str, typer.Option(help="Name of the model.")] = "mock",
    seed: Annotated[int, typer.Option(help="Of which requests meet the fault.")] = 0,
) -> None:
    """Serve a scripted OpenAI-compatible server: exact timings, faults on demand.

    GET /mock/log tells when each request arrived and each event was written.
    """
    from kvctl.bench.mock_script import MockScript
    from kvctl.bench.mock_server import run_mock
    from kvctl.units import parse_seconds

    script = MockScript(
        ttft_s=parse_seconds(ttft),
        gap_s=parse_seconds(gap),
        tokens=tokens or None,
        tokens_per_event=tokens_per_event,
        role_delta=not no_role_delta,
        finish_delta=not no_finish_delta,
        reasoning_tokens=reasoning_tokens,
        usage=not no_usage,
        event_bytes=event_bytes,
        trickle_bytes=trickle_bytes,
        fault=fault,
        fault_share=fault_share,
        fault_after_tokens=fault_after_tokens,
        retry_after_s=None if retry_after < 0 else retry_after,
        slots=slots,
        tokens_per_word=tokens_per_word,
        prompt_overhead_tokens=prompt_overhead,
        prefix_cache=prefix_cache,
        model=model,
        seed=seed,
    )
    run_mock(script, host, port, lambda real: print(f"http://{host}:{real}", flush=True))
