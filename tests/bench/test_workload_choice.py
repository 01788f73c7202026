"""Cache busting: no session begins as another does, and what its messages hold stays what it was."""

from kvctl.bench.body import BodyBuilder
from kvctl.bench.run_config import RequestConfig
from kvctl.bench.workload_choice import WorkloadChoice
from kvctl.workload.datasets import Dataset
from kvctl.workload.prompts import PromptMaker
from kvctl.workload.request_plan import Session, Turn


def busted(*turns):
    choice = WorkloadChoice(dataset=Dataset("d", "jsonl", [Session(turns)] * 2), cache_bust=True)
    return list(choice.sessions(PromptMaker(1)))


def test_texts_and_messages_begin_with_words_of_their_own():
    parts = [{"type": "text", "text": "look"}, {"type": "image_url", "image_url": {"url": "data:x"}}]
    for content in ("hello", parts):
        message = {"role": "user", "content": content}
        first, second = busted(Turn("", 5, messages=[message]), Turn("", 5, messages=[message, message]))
        begins = {str(turn.messages[0]["content"])[:60] for turn in (*first.turns, *second.turns)}
        assert len(begins) == 2  # one beginning for all turns of a session
        if content is parts:
            assert first.turns[0].messages[0]["content"][1:] == parts
        assert first.turns[1].messages[1] == message
    assert len({session.turns[0].text for session in busted(Turn("hello", 5), Turn("again", 5))}) == 2
    assert busted(Turn("hello", 5), Turn("again", 5))[0].turns[1].text == "again"


def test_a_later_turn_of_a_completion_begins_as_prompt_and_answer_were():
    body = BodyBuilder(RequestConfig()).build(Turn("next", 5, system="sys"), [("first", " answer")])
    assert b'"prompt":"sys first answer next"' in body
