"""Where chat templates run: Jinja's immutable sandbox, with what templates on model hubs use, and with an end.

A template comes with a model, or from a client, and is not trusted: it reaches no attribute that leads out, changes
nothing it is given, and is stopped after LIMIT_S seconds of work. What it does NOT bound is memory: who takes templates
from clients renders them in `template_child`. Constants are not folded, so that compiling one cannot take long either.
Knows no messages. Floor 2, imports no torch.
"""

import json
import threading
import time
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Any, Final

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.compiler import CodeGenerator
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

LIMIT_S: Final = 5.0  # of processor time; a template needs a few microseconds per message
_STEPS_PER_LOOK: Final = 64  # at the clock
_STEP, _EACH = "kvctl_step", "kvctl_each"


class WorkLimit(threading.local):
    """Counts a rendering's steps and stops it when its time is over; each thread has its own count."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._end_s = 0.0

    def start(self, limit_s: float = LIMIT_S) -> None:
        """Give the rendering that begins now its time."""
        self._end_s = time.thread_time() + limit_s

    def step(self, _value: object = None) -> str:
        """Take a step of a loop or a call of a macro."""
        self._num_steps += 1
        if not self._num_steps % _STEPS_PER_LOOK and time.thread_time() > self._end_s:
            raise jinja2.TemplateRuntimeError("it works on them without an end")
        return ""

    def each(self, items: Iterable[Any]) -> Iterator[Any]:
        """Take a step for each item, also for those that a loop's condition then leaves out."""
        for item in items:
            self.step()
            yield item


class _SteppingGenerator(CodeGenerator):
    """Compiles a step into the body of every loop and macro: all that can make a template run long."""

    def visit_Template(self, node: nodes.Template, frame: Any = None) -> None:  # noqa: N802  (jinja2's name)
        for loop in list(node.find_all(nodes.For)):
            if loop.test is not None:
                loop.iter = _filtered(loop.iter, _EACH)
            loop.body.insert(0, _a_step())
        for macro in list(node.find_all(nodes.Macro)):
            macro.body.insert(0, _a_step())
        for call in list(node.find_all(nodes.CallBlock)):
            call.body.insert(0, _a_step())
        super().visit_Template(node, frame)

    def _output_child_to_const(self, node: nodes.Expr, frame: Any, finalize: Any) -> str:
        """Leave to the rendering what is no plain text: `{{ 9 ** 10 ** 9 }}` would be computed here."""
        if not isinstance(node, nodes.TemplateData | nodes.Const):
            raise nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)


def _a_step() -> nodes.ExprStmt:
    return nodes.ExprStmt(_filtered(nodes.Const(0), _STEP))


def _filtered(value: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(value, name, [], [], None, None)


class _GenerationMark(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's words for training; here it only stands aside."""

    tags = {"generation"}  # noqa: RUF012  (the base class has a plain set)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format_: str) -> str:
    return datetime.now().strftime(format_)  # the local date is meant


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter would escape <, > and & for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def build_environment(limit: WorkLimit) -> ImmutableSandboxedEnvironment:
    """Build the environment to compile templates in; whoever renders calls `limit.start()` before."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationMark, jinja2.ext.loopcontrols], optimized=False
    )
    environment.code_generator_class = _SteppingGenerator
    environment.filters |= {"tojson": _to_json, _STEP: limit.step, _EACH: limit.each}
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return environment
