"""Profiles: the shipped ones, what they make, and what is refused."""

from collections import Counter
from itertools import islice

import pytest

from kvctl.errors import ConfigError
from kvctl.workload.prompts import PromptMaker, TokenRate
from kvctl.workload.workload_profile import load_profile, parse_profile, profile_folder

SHIPPED = ["agent", "batch", "chat", "code", "rag"]


def test_the_shipped_profiles_are_the_promised_ones():
    assert sorted(path.stem for path in profile_folder().glob("*.yaml")) == SHIPPED


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_profile_says_where_its_numbers_come_from_and_makes_sessions(name):
    profile = load_profile(name)
    assert profile.name == name
    assert profile.source
    assert profile.description
    for session in islice(profile.sessions(PromptMaker(1)), 30):
        assert session.class_name in {kind.name for kind in profile.classes}
        assert all(turn.output_tokens >= 1 and turn.text for turn in session.turns)


def profile_of(**fields):
    return parse_profile({"classes": [{"name": "a", "input_tokens": 20, "output_tokens": 5, **fields}]}, "p.yaml")


def test_weights_are_the_shares_of_the_classes():
    document = {
        "classes": [
            {"name": "often", "weight": 3, "input_tokens": 5, "output_tokens": 5},
            {"name": "rare", "weight": 1, "input_tokens": 5, "output_tokens": 5},
        ]
    }
    sessions = islice(parse_profile(document, "p.yaml").sessions(PromptMaker(1)), 4000)
    counts = Counter(session.class_name for session in sessions)
    assert counts["often"] / 4000 == pytest.approx(0.75, abs=0.03)


def test_groups_share_their_prefix_and_nothing_else():
    profile = profile_of(shared_prefix={"groups": 3, "tokens": 64})
    sessions = list(islice(profile.sessions(PromptMaker(1)), 60))
    assert len({session.turns[0].system for session in sessions}) == 3
    assert len({session.turns[0].text for session in sessions}) == 60
    assert sessions[0].turns[0].input_tokens == 84


def test_the_tokens_of_a_template_are_taken_off_the_text_behind_a_shared_prefix():
    rate = TokenRate(overhead_tokens=13.0)
    session = next(profile_of(shared_prefix={"groups": 1, "tokens": 64}).sessions(PromptMaker(1, rate)))
    turn = session.turns[0]
    assert len(turn.system.split()) + len(turn.text.split()) + 13 == turn.input_tokens == 84


def test_cache_bust_makes_shared_prefixes_differ():
    profile = profile_of(shared_prefix={"groups": 1, "tokens": 64})
    sessions = islice(profile.sessions(PromptMaker(1), cache_bust=True), 40)
    assert len({session.turns[0].system for session in sessions}) == 40


def test_turns_wait_before_each_but_the_first():
    session = next(profile_of(turns={"count": 3, "think": "2s"}).sessions(PromptMaker(1)))
    assert [turn.think_s for turn in session.turns] == [0.0, 2.0, 2.0]


@pytest.mark.parametrize(
    ("document", "told"),
    [
        ([], "list of classes"),
        ({"classes": []}, "list of classes"),
        ({"classes": ["x"]}, "class 1"),
        ({"classes": [{"name": "a"}]}, "input_tokens"),
        ({"classes": [{"name": "a", "input_tokens": 1, "output_tokens": 1, "wait": 3}]}, "wait"),
        ({"classes": [{"name": "a", "input_tokens": 1, "output_tokens": 1, "weight": 0}]}, "weight"),
        ({"classes": [{"name": "a", "input_tokens": 1, "output_tokens": 1, "weight": "x"}]}, "no number"),
        ({"classes": [{"name": "a", "input_tokens": 1, "output_tokens": 1, "shared_prefix": 4}]}, "shared_prefix"),
        ({"classes": [{"name": "a", "input_tokens": 1, "output_tokens": 1, "turns": 0}]}, "no number of tokens"),
    ],
)
def test_a_wrong_profile_is_refused_at_its_place(document, told):
    with pytest.raises(ConfigError, match=told):
        parse_profile(document, "p.yaml")


def test_files_that_are_no_profiles_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="no workload") as refused:
        load_profile("chatt")
    assert "chat" in refused.value.hint
    broken = tmp_path / "broken.yaml"
    broken.write_text("classes: [\n  - {")
    with pytest.raises(ConfigError, match=r"broken\.yaml:\d"):
        load_profile(str(broken))
