"""vLLM's flags that `kvctl serve` does not have: ignored where the answers stay the same, refused where not.

So that a vLLM command line mostly just works, and never silently does something else. Also vLLM's ways of writing
flags: underscores for dashes, several values after one list flag, short names. Floor 4.
"""

import sys
from collections.abc import Iterator
from typing import Any, Final

from kvctl.cli.config_file import config_file_arguments
from kvctl.cli.help_page import HelpPageCommand
from kvctl.errors import ConfigError

# flag -> whether a value follows; nothing about the answers changes without it
IGNORED: Final[dict[str, bool]] = {
    "--aggregate-engine-logging": False,
    "--api-server-count": True,
    "--attention-backend": True,
    "--collect-detailed-traces": True,
    "--compilation-config": True,
    "--cpu-offload-gb": True,
    "--cudagraph-capture-sizes": True,
    "--cudagraph-metrics": False,
    "--custom-histogram-buckets": True,
    "--data-parallel-backend": True,
    "--disable-cascade-attn": False,
    "--disable-custom-all-reduce": False,
    "--disable-hybrid-kv-cache-manager": False,
    "--disable-log-requests": False,
    "--distributed-executor-backend": True,
    "--enable-log-outputs": False,
    "--enable-logging-iteration-details": False,
    "--enable-mfu-metrics": False,
    "--enable-per-request-metrics": False,
    "--enable-prompt-tokens-details": False,
    "--enable-server-load-tracking": False,
    "--enable-sleep-mode": False,
    "--fingerprint-mode": True,
    "--h11-max-header-count": True,
    "--h11-max-incomplete-event-size": True,
    "--kv-cache-metrics": False,
    "--kv-cache-metrics-sample": True,
    "--limit-mm-per-prompt": True,
    "--max-log-len": True,
    "--max-num-active-seqs": True,
    "--max-num-scheduled-tokens": True,
    "--max-parallel-loading-workers": True,
    "--model-impl": True,
    "--num-lookahead-slots": True,
    "--optimization-level": True,
    "--otlp-traces-endpoint": True,
    "--prefill-schedule-interval": True,
    "--prefix-cache-retention-interval": True,
    "--prefix-match-unit": True,
    "--renderer-num-workers": True,
    "--safetensors-load-strategy": True,
    "--scheduler-cls": True,
    "--sse-keep-alive-interval": True,
    "--stream-interval": True,
    "--swap-space": True,
    "--tokenizer-mode": True,
    "--trust-remote-code": False,
    "--use-tqdm-on-load": False,
    "--chat-template-content-format": True,
    "--structured-outputs-config": True,
}

# flag -> (values that ask for what kvctl does anyway, what it would need); "" among the values: a bare flag is fine
REFUSED: Final[dict[str, tuple[tuple[str, ...], str]]] = {
    "--tensor-parallel-size": (("1",), "more than one device"),
    "--pipeline-parallel-size": (("1",), "more than one device"),
    "--data-parallel-size": (("1",), "more than one engine"),
    "--decode-context-parallel-size": (("1",), "more than one device"),
    "--prefill-context-parallel-size": (("1",), "more than one device"),
    "--quantization": (("none",), "quantized weights"),
    "--quantization-config": ((), "quantized weights"),
    "--kv-offloading-size": (("0",), "KV offloading"),
    "--kv-offloading-backend": ((), "KV offloading"),
    "--kv-transfer-config": ((), "KV transfer"),
    "--kv-events-config": ((), "KV events"),
    "--speculative-config": ((), "speculative decoding"),
    "--spec-method": ((), "speculative decoding"),
    "--spec-model": ((), "speculative decoding"),
    "--spec-tokens": ((), "speculative decoding"),
    "--lora-modules": ((), "LoRA adapters"),
    "--max-loras": ((), "LoRA adapters"),
    "--max-lora-rank": ((), "LoRA adapters"),
    "--max-cpu-loras": ((), "LoRA adapters"),
    "--runner": (("auto", "generate"), "anything but generation"),
    "--convert": (("auto", "none"), "anything but generation"),
    "--tokenizer": ((), "a tokenizer apart from the model"),
    "--hf-overrides": (("{}",), "changes to config.json"),
    "--hf-config-path": ((), "a config.json apart from the model"),
    "--logprobs-mode": (("raw_logprobs",), "logprobs other than raw ones"),
    "--reasoning-parser": (("",), "a parser for reasoning"),
    "--tool-call-parser": ((), "a parser for tool calls"),
    "--middleware": ((), "middleware"),
    "--download-dir": ((), "a flag for the hub's cache: set HF_HUB_CACHE"),
    "--hf-token": ((), "a flag for the hub's key: set HF_TOKEN"),
    "--max-num-queued-tokens": ((), "a limit of queued tokens"),
}
REFUSED_SWITCHES: Final[dict[str, str]] = {
    "--enable-lora": "LoRA adapters",
    "--enable-auto-tool-choice": "a parser for tool calls",
    "--enable-prompt-embeds": "prompts of embeddings",
    "--enable-expert-parallel": "more than one device",
    "--enable-eplb": "more than one device",
    "--headless": "more than one node",
    "--skip-tokenizer-init": "a server without tokenizer",
}
SHORT: Final = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-q": "--quantization",
    "-O": "--optimization-level",
    "-cc": "--compilation-config",
    "-sc": "--speculative-config",
    "-asc": "--api-server-count",
}
_LIST_FLAGS: Final = ("--api-key", "--served-model-name")


def translate(arguments: list[str]) -> Iterator[str]:
    """Yield vLLM's command line as ours: without what is ignored, one value per flag.

    Raises:
        ConfigError: a flag that would change the answers.
    """
    position = 0
    has_model = bool(arguments) and not arguments[0].startswith("-")
    while position < len(arguments):
        word = arguments[position]
        position += 1
        if not word.startswith("-") or word in ("-", "--"):
            yield word
            continue
        name, equals, value = word.partition("=")
        name = SHORT.get(name, name.replace("_", "-"))
        switch = name.replace("--no-", "--", 1)
        if IGNORED.get(name) or name in REFUSED:
            if not equals:
                value = arguments[position] if position < len(arguments) else ""
                position += 1
            _judge(name, value)
        elif switch in IGNORED:
            _warn(name)
        elif name in REFUSED_SWITCHES:
            raise _refusal(name, REFUSED_SWITCHES[name])
        elif switch in REFUSED_SWITCHES:
            continue
        else:
            yield f"{name}{equals}{value}"
            if name in _LIST_FLAGS and has_model and not equals:
                yield from arguments[position : position + 1]
                position += 1
                while position < len(arguments) and not arguments[position].startswith("-"):
                    yield from (name, arguments[position])
                    position += 1


def _judge(name: str, value: str) -> None:
    if name not in REFUSED:
        _warn(name)
        return
    harmless, what = REFUSED[name]
    if value.lower() not in harmless:
        raise _refusal(f"{name} {value}".rstrip(), what)


def _warn(name: str) -> None:
    print(f"kvctl: {name} is ignored: kvctl serve has no such setting, answers stay the same", file=sys.stderr)


def _refusal(flag: str, what: str) -> ConfigError:
    return ConfigError(f"{flag}: kvctl serve has not {what}", hint="Leave the flag out.")


class ServeCommand(HelpPageCommand):
    """The command with the config file read and vLLM's flags sorted out before anything is parsed."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read --config, translate, parse."""
        given = list(translate(args))
        from_file, model = config_file_arguments(given)
        if model is not None:
            ctx.default_map = {"model": model}
        return super().parse_args(ctx, [*translate(from_file), *given])
