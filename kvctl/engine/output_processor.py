"""From the engine's tokens to text: detokenizes, matches stop strings, measures, hands each request its news.

One call per step for all requests; shared by AsyncLLM and the offline LLM. Knows no sockets and no event loop: a
`Sink` takes what concerns one request. An error in making one request's text ends that request only.
Floor 2, imports no torch.
"""

from collections.abc import Sequence
from typing import Protocol

from kvctl.core.request import FinishReason
from kvctl.core.step import EngineOutput, StepResult
from kvctl.engine.detokenizer import IncrementalDetokenizer, StopStringMatcher
from kvctl.engine.engine_metrics import EngineMetrics
from kvctl.engine.request_output import RequestOutput
from kvctl.engine.tokenizer import Tokenizer, is_tokenizer_error
from kvctl.engine.wire import EngineRequest
from kvctl.errors import InvalidRequest, KvctlError
from kvctl.metrics.timeline import RequestTimeline


class Sink(Protocol):
    """Where one request's outputs go."""

    def put(self, output: RequestOutput) -> None:
        """Take an output; the last one has `finished=True`."""
        ...

    def fail(self, error: KvctlError) -> None:
        """Learn that no output will come any more."""
        ...


class _Parent:
    """A request as its caller knows it: n children and one sink."""

    __slots__ = ("child_ids", "longest_tokens", "n", "num_open", "request_id", "sink")

    def __init__(self, request_id: str, sink: Sink, child_ids: list[str]) -> None:
        self.request_id = request_id
        self.sink = sink
        self.child_ids = child_ids
        self.n = len(child_ids)
        self.num_open = self.n
        self.longest_tokens = 0


class _Child:
    """One completion on its way."""

    __slots__ = (
        "admitted_s",
        "arrival_s",
        "detokenizer",
        "first_token_s",
        "index",
        "last_token_s",
        "num_cached_tokens",
        "num_first_tokens",
        "num_output_tokens",
        "num_preemptions",
        "params",
        "parent",
        "prompt_token_ids",
        "request_id",
        "requested_max_tokens",
        "stop_matcher",
    )

    def __init__(
        self, parent: _Parent, index: int, request: EngineRequest, tokenizer: Tokenizer, requested_max_tokens: int
    ) -> None:
        params = request.sampling_params
        self.parent = parent
        self.index = index
        self.request_id = request.request_id
        self.prompt_token_ids = request.prompt_token_ids
        self.params = params
        self.requested_max_tokens = requested_max_tokens
        self.detokenizer = IncrementalDetokenizer(
            tokenizer.backend, request.prompt_token_ids, skip_special_tokens=params.skip_special_tokens
        )
        self.stop_matcher = (
            StopStringMatcher(params.stop, include_in_output=params.include_stop_str_in_output) if params.stop else None
        )
        self.arrival_s = request.arrival_s
        self.admitted_s: float | None = None
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        self.num_first_tokens = 1
        self.num_output_tokens = 0
        self.num_cached_tokens = 0
        self.num_preemptions: int | None = None

    def timeline(self) -> RequestTimeline:
        """Return when things happened so far."""
        return RequestTimeline(
            self.arrival_s,
            self.admitted_s,
            self.first_token_s,
            self.last_token_s,
            self.num_output_tokens,
            self.num_first_tokens,
        )

    def text_of(self, output: EngineOutput) -> tuple[str, str | None]:
        """Make text of new tokens; return it with the stop string that ended it, if one did."""
        params = self.params
        token_ids: Sequence[int] = output.new_token_ids
        if output.finish_reason is FinishReason.STOP and not params.include_stop_str_in_output:
            token_ids = token_ids[:-1]  # the token that ended it is a sign, not text
        push = self.detokenizer.push
        matcher = self.stop_matcher
        if matcher is None:
            text = push(token_ids[0]) if len(token_ids) == 1 else "".join(map(push, token_ids))
            return (text if output.finish_reason is None else text + self.detokenizer.flush()), None
        shown = ""
        num_tokens = self.num_output_tokens - len(output.new_token_ids)
        for token_id in token_ids:
            num_tokens += 1
            piece, stop = matcher.push(push(token_id), may_stop=num_tokens >= params.min_tokens)
            shown += piece
            if stop is not None:
                return shown, stop
        if output.finish_reason is not None:
            piece, stop = matcher.push(self.detokenizer.flush(), may_stop=num_tokens >= params.min_tokens)
            shown += piece
            if stop is None:
                shown += matcher.flush()
            elif output.finish_reason is not FinishReason.STOP:
                return shown, stop
        return shown, None


class OutputProcessor:
    """All unfinished requests of one engine."""

    def __init__(self, tokenizer: Tokenizer, metrics: EngineMetrics) -> None:
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._children: dict[str, _Child] = {}
        self._parents: dict[str, _Parent] = {}

    @property
    def num_unfinished(self) -> int:
        """Requests (not children) that have not ended."""
        return len(self._parents)

    def unfinished_ids(self) -> list[str]:
        """Return the ids of the requests (not children) that have not ended."""
        return list(self._parents)

    def has(self, request_id: str) -> bool:
        """Whether a request of this id (a child's id counts) is unfinished."""
        return request_id in self._parents or request_id in self._children

    def add(self, request_id: str, children: Sequence[EngineRequest], sink: Sink, *, requested_max_tokens: int) -> None:
        """Expect outputs of a request's `children`.

        Raises:
            InvalidRequest: an id that is in use.
        """
        taken = [child.request_id for child in children if self.has(child.request_id)]
        if taken or self.has(request_id):
            raise InvalidRequest(f"request id {(taken or [request_id])[0]!r} is in use", param="request_id")
        parent = _Parent(request_id, sink, [child.request_id for child in children])
        self._parents[request_id] = parent
        for index, child in enumerate(children):
            self._children[child.request_id] = _Child(parent, index, child, self._tokenizer, requested_max_tokens)
            self._metrics.request_accepted()

    def process(self, result: StepResult, now_s: float) -> list[str]:
        """Hand out the news of one step, received at `now_s`; return the ids that the engine must abort."""
        children = self._children
        for admission in result.admissions:
            admitted = children.get(admission.request_id)
            if admitted is not None and admitted.admitted_s is None:  # again after a preemption is not the first
                admitted.admitted_s = admission.at_s
        to_abort: list[str] = []
        num_generated_tokens = 0
        for output in result.outputs:
            child = children.get(output.request_id)
            if child is None:
                continue  # ended here already: a stop string, an abort
            num_generated_tokens += len(output.new_token_ids)
            try:
                if self._process_one(child, output, now_s):
                    to_abort.append(output.request_id)
            except BaseException as error:  # what is wrong with the text of one request must not stop the others
                if not is_tokenizer_error(error):
                    raise
                to_abort += self.fail(
                    child.parent.request_id,
                    KvctlError(f"the request's output could not be read: {type(error).__name__}: {error}"),
                )
        self._metrics.step_done(result.stats, num_generated_tokens)
        return to_abort

    def abort(self, request_id: str) -> list[str]:
        """End a request; its sink gets a last output per open child. Returns the children the engine must abort."""
        parent = self._parents.get(request_id)
        if parent is None:
            return []
        open_children = [self._children[child_id] for child_id in parent.child_ids if child_id in self._children]
        for child in open_children:
            text = child.detokenizer.flush()
            if child.stop_matcher is not None:
                text = child.stop_matcher.push(text, may_stop=False)[0] + child.stop_matcher.flush()
            self._end(child, RequestOutput(request_id, child.prompt_token_ids, child.index, text), FinishReason.ABORT)
        return [child.request_id for child in open_children]

    def fail(self, request_id: str, error: KvctlError) -> list[str]:
        """End a request (or the request of a child) with an error. Returns the children the engine must abort."""
        child = self._children.get(request_id)
        parent = self._parents.get(request_id) or (child.parent if child else None)
        if parent is None:
            return []
        open_ids = [child_id for child_id in parent.child_ids if child_id in self._children]
        for child_id in open_ids:
            self._count_end(self._children.pop(child_id), FinishReason.ERROR)
        self._forget(parent)
        parent.sink.fail(error)
        return open_ids

    def fail_all(self, error: KvctlError) -> None:
        """End all requests with an error: the engine is gone."""
        for request_id in list(self._parents):
            self.fail(request_id, error)
        self._metrics.engine_died()

    # ---- internals ----

    def _process_one(self, child: _Child, output: EngineOutput, now_s: float) -> bool:
        """Hand out one output; return whether the engine must be told to abort."""
        new_token_ids = output.new_token_ids
        if new_token_ids:
            self._measure(child, output, now_s)
        text, stop = child.text_of(output)
        reason: FinishReason | None = output.finish_reason
        stop_reason: int | str | None = output.stop_reason
        if stop is not None:
            reason, stop_reason = FinishReason.STOP, stop
        delivery = RequestOutput(child.parent.request_id, child.prompt_token_ids, child.index, text, new_token_ids)
        delivery.num_cached_tokens = child.num_cached_tokens
        if output.logprobs is not None:
            delivery.logprobs_delta = [output.logprobs]
        if output.prompt_logprobs is not None:
            delivery.prompt_logprobs = output.prompt_logprobs
        if reason is None:
            child.parent.sink.put(delivery)
            return False
        if output.finish_reason is not None:
            child.num_preemptions = output.num_preemptions
        delivery.stop_reason = stop_reason
        self._end(child, delivery, reason)
        return output.finish_reason is None

    def _measure(self, child: _Child, output: EngineOutput, now_s: float) -> None:
        num_new_tokens = len(output.new_token_ids)
        child.num_output_tokens += num_new_tokens
        last_s = child.last_token_s
        child.last_token_s = now_s
        if last_s is None:
            child.first_token_s = now_s
            child.num_first_tokens = num_new_tokens
            child.num_cached_tokens = output.num_cached_tokens
            self._metrics.first_token(
                len(child.prompt_token_ids), output.num_cached_tokens, max(0.0, now_s - child.arrival_s)
            )
        else:
            self._metrics.inter_token_latency(now_s - last_s)

    def _end(self, child: _Child, delivery: RequestOutput, reason: FinishReason) -> None:
        del self._children[child.request_id]
        delivery.finish_reason = reason
        delivery.num_cached_tokens = child.num_cached_tokens
        delivery.timeline = child.timeline()
        self._count_end(child, reason)
        parent = child.parent
        if parent.num_open == 0:
            delivery.finished = True
            self._forget(parent)
        parent.sink.put(delivery)

    def _count_end(self, child: _Child, reason: FinishReason) -> None:
        parent = child.parent
        parent.num_open -= 1
        parent.longest_tokens = max(parent.longest_tokens, child.num_output_tokens)
        self._metrics.request_ended(
            reason,
            child.timeline(),
            num_prompt_tokens=len(child.prompt_token_ids),
            num_cached_tokens=child.num_cached_tokens,
            num_preemptions=child.num_preemptions,
            max_tokens=child.requested_max_tokens,
        )

    def _forget(self, parent: _Parent) -> None:
        del self._parents[parent.request_id]
        self._metrics.all_children_ended(parent.n, parent.longest_tokens)
