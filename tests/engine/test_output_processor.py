import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvctl.core.request import FinishReason
from kvctl.core.sampling_params import SamplingParams
from kvctl.core.step import AdmissionEvent, EngineOutput, SchedulerStats, StepResult, TokenLogprobs
from kvctl.engine.engine_metrics import EngineMetrics
from kvctl.engine.output_processor import OutputProcessor
from kvctl.engine.wire import EngineRequest
from kvctl.errors import EngineDead, InvalidRequest
from kvctl.metrics.recorder import InMemoryRecorder
from tests.support.byte_tokenizer import EOS_ID, build_tokenizer

TOKENIZER = build_tokenizer()
ABORT, LENGTH, STOP = FinishReason.ABORT, FinishReason.LENGTH, FinishReason.STOP


class ListSink:
    def __init__(self):
        self.outputs = []
        self.error = None

    def put(self, output):
        self.outputs.append(output)

    def fail(self, error):
        self.error = error

    @property
    def text(self):
        return "".join(output.text_delta for output in self.outputs)

    @property
    def token_ids(self):
        return [token_id for output in self.outputs for token_id in output.token_ids_delta]

    @property
    def last(self):
        return self.outputs[-1]


class Harness:
    """An OutputProcessor that is fed by hand."""

    def __init__(self):
        self.recorder = InMemoryRecorder()
        self.processor = OutputProcessor(TOKENIZER, EngineMetrics(self.recorder))

    def add(self, request_id="r", prompt=b"prompt", *, children=1, arrival_s=0.0, **params):
        sink = ListSink()
        sampling = SamplingParams(**({"max_tokens": 100} | params))
        ids = [request_id] if children == 1 else [f"{request_id}_{i}" for i in range(children)]
        requests = [EngineRequest(child, list(prompt), sampling, arrival_s) for child in ids]
        self.processor.add(request_id, requests, sink, requested_max_tokens=sampling.max_tokens)
        return sink

    def step(self, *outputs, now_s=1.0, admitted=(), **stats):
        events = [AdmissionEvent(request_id, at_s) for request_id, at_s in admitted]
        return self.processor.process(StepResult(list(outputs), SchedulerStats(**stats), now_s, events), now_s)

    def say(self, text, request_id="r", finish=None, **fields):
        """One token per byte, a step each; returns what had to be aborted."""
        data = text.encode() if isinstance(text, str) else text
        aborted = []
        for index, byte in enumerate(data):
            reason = finish if index == len(data) - 1 else None
            aborted += self.step(EngineOutput(request_id, [byte], reason, **(fields if reason else {})))
        return aborted

    def count(self, name, **labels):
        return self.recorder.counter(name, **labels).value

    def ended(self):
        return {
            reason.value: int(count)
            for reason in FinishReason
            if (count := self.count("vllm:request_success", finished_reason=reason.value))
        }


@pytest.fixture
def harness():
    return Harness()


def test_a_request_streams_its_text_and_ends(harness):
    sink = harness.add()
    assert harness.say("héllo", finish=LENGTH) == []
    assert sink.text == "héllo"
    assert sink.token_ids == list("héllo".encode())
    assert [output.finished for output in sink.outputs] == [False] * 5 + [True]
    assert sink.last.finish_reason is LENGTH
    assert harness.processor.num_unfinished == 0


def test_the_token_that_ended_it_is_counted_but_not_shown(harness):
    sink = harness.add(skip_special_tokens=False)
    harness.step(EngineOutput("r", [104]))
    harness.step(EngineOutput("r", [EOS_ID], STOP))
    assert sink.text == "h"
    assert sink.token_ids == [104, EOS_ID]
    shown = harness.add("s", include_stop_str_in_output=True, stop_token_ids=(105,))
    harness.step(EngineOutput("s", [104]))
    harness.step(EngineOutput("s", [105], STOP, stop_reason=105))
    assert shown.text == "hi"
    assert shown.last.stop_reason == 105


def test_a_stop_string_ends_the_request_and_the_engine_is_told(harness):
    sink = harness.add(stop=("END",))
    assert harness.say("some EN") == []
    assert sink.text == "some "
    assert harness.say("D") == ["r"]
    assert sink.text == "some "
    assert sink.last.finish_reason is STOP
    assert sink.last.stop_reason == "END"
    assert sink.token_ids == list(b"some END")
    assert harness.say("late") == []  # what the engine had computed already
    assert len(sink.outputs) == 8
    assert harness.ended() == {"stop": 1}
    assert harness.count("vllm:generation_tokens") == 8


def test_a_stop_string_in_the_very_last_token_needs_no_abort(harness):
    sink = harness.add(stop=("END",))
    assert harness.say("xEND", finish=LENGTH) == []
    assert (sink.text, sink.last.finish_reason, sink.last.stop_reason) == ("x", STOP, "END")


def test_text_held_back_for_a_stop_string_comes_out_at_the_end(harness):
    sink = harness.add(stop=("END",))
    harness.say("the EN", finish=LENGTH)
    assert (sink.text, sink.last.finish_reason) == ("the EN", LENGTH)


@pytest.mark.parametrize(("min_tokens", "expected"), [(0, "a"), (2, "a"), (3, "aba"), (5, "ababcc")])
def test_a_stop_string_does_not_count_before_min_tokens(harness, min_tokens, expected):
    sink = harness.add(stop=("b",), min_tokens=min_tokens)
    harness.say("ababccb")
    # a stop string that ends with token number min_tokens leaves at least that many tokens: it counts
    assert sink.text == expected


def test_several_tokens_in_one_step_are_cut_inside(harness):
    sink = harness.add(stop=("b",))
    assert harness.step(EngineOutput("r", [97, 98, 99])) == ["r"]
    assert sink.text == "a"


def test_children_end_one_by_one_and_the_request_with_the_last(harness):
    sink = harness.add(children=3)
    harness.say("x", "r_1", finish=LENGTH)
    harness.say("y", "r_0", finish=STOP)
    assert not any(output.finished for output in sink.outputs)
    harness.say("z", "r_2", finish=LENGTH)
    assert sink.last.finished
    assert [(output.index, output.finish_reason) for output in sink.outputs] == [(1, LENGTH), (0, STOP), (2, LENGTH)]
    assert harness.recorder.histogram("vllm:request_params_n").sum == 3
    assert harness.ended() == {"length": 2, "stop": 1}


def test_abort_ends_the_open_children_with_their_held_text(harness):
    sink = harness.add(children=2, stop=("END",))
    harness.say("done", "r_0", finish=LENGTH)
    harness.say("half E", "r_1")
    assert harness.processor.abort("r") == ["r_1"]
    assert sink.last.finished
    assert sink.last.finish_reason is ABORT
    assert "".join(o.text_delta for o in sink.outputs if o.index == 1) == "half E"
    assert harness.processor.abort("r") == []
    assert harness.ended() == {"abort": 1, "length": 1}


def test_logprobs_and_prompt_logprobs_are_passed_on(harness):
    sink = harness.add(logprobs=1)
    logprobs = TokenLogprobs([97, 98], [-0.1, -3.0], 1)
    harness.step(EngineOutput("r", [97], logprobs=logprobs, prompt_logprobs=[None, logprobs], num_cached_tokens=4))
    harness.step(EngineOutput("r", [97], LENGTH, logprobs=logprobs))
    assert [output.logprobs_delta for output in sink.outputs] == [[logprobs], [logprobs]]
    assert [output.prompt_logprobs for output in sink.outputs] == [[None, logprobs], None]
    assert [output.num_cached_tokens for output in sink.outputs] == [4, 4]


def test_an_id_in_use_is_refused(harness):
    harness.add("r", children=2)
    for taken in ("r", "r_1"):
        with pytest.raises(InvalidRequest, match="in use"):
            harness.add(taken)
    assert harness.processor.unfinished_ids() == ["r"]


def test_a_bug_in_one_requests_text_ends_that_request_only(harness):
    broken, other = harness.add("broken"), harness.add("other")
    harness.processor._children["broken"].detokenizer = None
    assert harness.step(EngineOutput("broken", [97]), EngineOutput("other", [97])) == ["broken"]
    assert "AttributeError" in broken.error.message
    assert other.text == "a"
    assert harness.processor.unfinished_ids() == ["other"]


def test_when_the_engine_dies_every_request_hears_it_and_the_gauges_fall(harness):
    sinks = [harness.add(f"r{i}", children=i + 1) for i in range(3)]
    harness.step(num_running=3, num_waiting=3, waiting_by_reason={"kv_blocks": 3}, num_usable_blocks=10)
    death = EngineDead("gone")
    harness.processor.fail_all(death)
    assert [sink.error for sink in sinks] == [death] * 3
    assert harness.processor.num_unfinished == 0
    assert harness.ended() == {"error": 6}
    for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"):
        assert harness.recorder.gauge(name).value == 0
    assert harness.recorder.gauge("kvctl:num_requests_waiting_by_reason", reason="kv_blocks").value == 0


# ---- what is counted ----


def test_latencies_are_those_of_the_timeline(harness):
    sink = harness.add(arrival_s=10.0)
    harness.step(admitted=[("r", 11.0)], now_s=11.5)
    harness.step(EngineOutput("r", [97], num_cached_tokens=2), now_s=13.0)
    harness.step(EngineOutput("r", [97]), now_s=14.0, admitted=[("r", 13.5)])  # again, after a preemption
    harness.step(EngineOutput("r", [97], LENGTH, num_preemptions=1), now_s=17.0)
    timeline = sink.last.timeline
    assert (timeline.ttft_s, timeline.queue_s, timeline.prefill_s) == (3.0, 1.0, 2.0)
    assert (timeline.decode_s, timeline.tpot_s, timeline.e2e_s) == (4.0, 2.0, 7.0)
    sums = {
        "time_to_first_token_seconds": 3.0,
        "inter_token_latency_seconds": 4.0,
        "request_time_per_output_token_seconds": 2.0,
        "e2e_request_latency_seconds": 7.0,
        "request_queue_time_seconds": 1.0,
        "request_prefill_time_seconds": 2.0,
        "request_decode_time_seconds": 4.0,
        "request_inference_time_seconds": 6.0,
        "request_prompt_tokens": 6,
        "request_generation_tokens": 3,
        "request_max_num_generation_tokens": 3,
        "request_params_max_tokens": 100,
        "request_prefill_kv_computed_tokens": 4,
        "request_num_preemptions": 1,
        "request_params_n": 1,
    }
    for name, expected in sums.items():
        assert harness.recorder.histogram(f"vllm:{name}").sum == expected, name
    assert harness.recorder.histogram("vllm:inter_token_latency_seconds").count == 2


def test_prompt_tokens_are_counted_by_source_once(harness):
    harness.add()
    harness.step(EngineOutput("r", [97], num_cached_tokens=4))
    harness.step(EngineOutput("r", [97], LENGTH, num_cached_tokens=4))
    assert harness.count("vllm:prompt_tokens") == 6
    assert harness.count("vllm:prompt_tokens_by_source", source="local_compute") == 2
    assert harness.count("vllm:prompt_tokens_by_source", source="local_cache_hit") == 4
    assert harness.count("vllm:prompt_tokens_cached") == 4


def test_the_state_of_a_step_is_on_the_gauges(harness):
    harness.step(num_running=5, num_waiting=2, waiting_by_reason={"max_num_seqs": 2}, num_free_blocks=25,
                 num_usable_blocks=100, num_scheduled_tokens=40, num_prefill_tokens=30, num_preemptions=1,
                 num_recomputed_tokens=7, prefix_cache_queries=50, prefix_cache_hits=20,
                 prefix_miss_reasons={"new": 25, "partial_block": 5})  # fmt: skip
    gauge = harness.recorder.gauge
    assert gauge("vllm:num_requests_running").value == 5
    assert gauge("vllm:num_requests_waiting_by_reason", reason="capacity").value == 2
    assert gauge("kvctl:num_requests_waiting_by_reason", reason="max_num_seqs").value == 2
    assert gauge("vllm:kv_cache_usage_perc").value == 0.75
    assert harness.count("kvctl:scheduled_tokens", phase="prefill") == 30
    assert harness.count("kvctl:scheduled_tokens", phase="decode") == 10
    assert harness.count("vllm:prefix_cache_queries") == 50
    assert harness.count("vllm:prefix_cache_hits") == 20
    assert harness.count("kvctl:prefix_cache_miss_tokens", reason="new") == 25
    assert harness.count("kvctl:recomputed_tokens") == 7
    harness.step(num_running=5, num_waiting=1, waiting_by_reason={"kv_blocks": 1})
    assert gauge("kvctl:num_requests_waiting_by_reason", reason="max_num_seqs").value == 0
    assert harness.recorder.histogram("vllm:iteration_tokens_total").count == 1  # the second step computed nothing


actions = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 5), st.integers(1, 3)),
        st.tuples(st.just("token"), st.integers(0, 5), st.integers(0, 2), st.sampled_from([None, LENGTH, STOP])),
        st.tuples(st.just("refuse"), st.integers(0, 5)),
        st.tuples(st.just("abort"), st.integers(0, 5)),
        st.tuples(st.just("die")),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(actions)
def test_accepted_requests_are_those_that_ended_and_those_still_here(plan):
    harness = Harness()
    sinks = []
    for action in plan:
        match action:
            case ("add", number, children) if not harness.processor.has(f"r{number}"):
                sinks.append(harness.add(f"r{number}", children=children))
            case ("token", number, child, finish):
                for request_id in (f"r{number}", f"r{number}_{child}"):
                    harness.step(EngineOutput(request_id, [97], finish))
            case ("abort", number):
                harness.processor.abort(f"r{number}")
            case ("refuse", number) if harness.processor.has(f"r{number}"):
                harness.processor.fail(f"r{number}", InvalidRequest("too long"))
            case ("die",):
                harness.processor.fail_all(EngineDead("gone"))
        open_children = len(harness.processor._children)
        assert harness.count("kvctl:requests_accepted") == sum(harness.ended().values()) + open_children
    ended = [sink for sink in sinks if sink.error is not None or (sink.outputs and sink.last.finished)]
    assert len(sinks) - len(ended) == harness.processor.num_unfinished
    assert all(sum(output.finished for output in sink.outputs) <= 1 for sink in sinks)
