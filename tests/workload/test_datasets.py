"""Files that people have: read as they are, and refused with the number of the line that is wrong."""

import json
from itertools import islice

import pytest

from kvctl.errors import ConfigError
from kvctl.workload.datasets import detect_format, load_dataset
from kvctl.workload.prompts import PromptMaker

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
"""
AZURE_2024 = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-10 00:00:00.017335+00:00,2399,6
"""
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,0,1087,Conversation log
118,GPT-4,417,276,693,Conversation log
"""


def write(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def jsonl(rows):
    return "\n".join(json.dumps(row) for row in rows) + "\n"


def sessions_of(path, **options):
    dataset = load_dataset(path, **options)
    return dataset, list(dataset.sessions(PromptMaker(1)))


def test_sharegpt_gives_the_first_exchange_of_each_conversation(tmp_path):
    conversations = [
        {"id": "a", "conversations": [{"from": "human", "value": "Hi?"}, {"from": "gpt", "value": "Hello. " * 40}]},
        {"id": "b", "conversations": [{"from": "gpt", "value": "alone"}]},
        {
            "id": "c",
            "conversations": [
                {"from": "system", "value": "be"},
                {"from": "user", "value": "Q"},
                {"from": "assistant", "value": "A"},
            ],
        },
    ]
    dataset, sessions = sessions_of(write(tmp_path, "s.json", json.dumps(conversations)))
    assert dataset.file_format == "sharegpt"
    assert [session.turns[0].text for session in sessions] == ["Hi?", "Q"]
    assert [session.turns[0].output_tokens for session in sessions] == [70, 4]
    assert not dataset.is_timed


def test_jsonl_takes_prompts_messages_sessions_and_times(tmp_path):
    rows = [
        {"prompt": "one", "max_tokens": 7, "timestamp": 100.0},
        {"messages": [{"role": "user", "content": "two"}], "timestamp": 100.5, "session": "s"},
        {"prompt": "three", "timestamp": 103, "session": "s"},
    ]
    dataset, sessions = sessions_of(write(tmp_path, "d.jsonl", jsonl(rows)), default_output_tokens=9)
    assert dataset.file_format == "jsonl"
    assert [session.due_s for session in sessions] == [0.0, 0.5]
    assert [turn.output_tokens for session in sessions for turn in session.turns] == [7, 9, 9]
    assert sessions[1].turns[0].messages == [{"role": "user", "content": "two"}]
    assert dataset.num_requests == 3


def test_mooncake_hashes_keep_the_sharing_of_prefixes(tmp_path):
    rows = [
        {"timestamp": 0, "input_length": 1200, "output_length": 5, "hash_ids": [1, 2, 3]},
        {"timestamp": 1500, "input_length": 1100, "output_length": 6, "hash_ids": [1, 2, 9]},
        {"timestamp": 3000, "input_length": 600, "output_length": 7, "hash_ids": [4, 2]},
    ]
    dataset, sessions = sessions_of(write(tmp_path, "m.jsonl", jsonl(rows)))
    assert dataset.file_format == "mooncake"
    words = [session.turns[0].text.split() for session in sessions]
    assert [len(text) for text in words] == [1200, 1100, 600]
    assert words[0][:1024] == words[1][:1024]
    assert words[0][1024:1040] != words[1][1024:1040]
    assert words[2][:16] != words[0][:16]
    assert [session.due_s for session in sessions] == [0.0, 1.5, 3.0]


@pytest.mark.parametrize("text", [AZURE, AZURE_2024])
def test_azure_times_keep_their_fractions(tmp_path, text):
    dataset, sessions = sessions_of(write(tmp_path, "a.csv", text))
    assert dataset.file_format == "azure"
    assert sessions[0].due_s == 0.0
    assert sessions[1].due_s == pytest.approx(0.052 if text is AZURE else 0.007405, abs=1e-6)
    assert len(sessions[0].turns[0].text.split()) == sessions[0].turns[0].input_tokens


def test_burstgpt_leaves_failed_requests_out(tmp_path):
    dataset, sessions = sessions_of(write(tmp_path, "b.csv", BURSTGPT))
    assert dataset.file_format == "burstgpt"
    assert [(session.due_s, session.turns[0].output_tokens) for session in sessions] == [(0.0, 18), (113.0, 276)]


def test_a_trace_can_be_replayed_faster(tmp_path):
    dataset = load_dataset(write(tmp_path, "b.csv", BURSTGPT)).sped_up(10)
    assert [entry.due_s for entry in dataset.entries] == [0.0, 11.3]
    with pytest.raises(ConfigError):
        dataset.sped_up(0)


def test_texts_of_a_trace_are_made_as_they_are_needed(tmp_path):
    rows = [{"timestamp": i, "input_length": 10_000_000, "output_length": 1, "hash_ids": []} for i in range(1000)]
    dataset = load_dataset(write(tmp_path, "m.jsonl", jsonl(rows)))
    assert dataset.entries[0].input_tokens == 10_000_000  # a text of each would be tens of gigabytes
    assert len(list(islice(dataset.sessions(PromptMaker(1)), 0))) == 0


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("d.jsonl", '{"prompt": "a"}\n\n{"prompt": \n', r"d\.jsonl:3 is not JSON"),
        ("d.jsonl", '{"prompt": "a"}\n[1]\n', r"d\.jsonl:2 is not an object"),
        ("d.jsonl", '{"prompt": "a"}\n{"text": "b"}\n', r"d\.jsonl:2 has neither"),
        ("d.jsonl", '{"prompt": "a", "max_tokens": 0}\n', r"d\.jsonl:1: max_tokens is 0"),
        ("d.jsonl", '{"prompt": "a", "max_tokens": "x"}\n', r"d\.jsonl:1: max_tokens"),
        ("d.jsonl", '{"prompt": "a", "timestamp": "x"}\n', r"d\.jsonl:1: timestamp"),
        ("d.jsonl", '{"prompt": "a", "timestamp": NaN}\n', r"d\.jsonl:1: timestamp"),
        ("b.csv", BURSTGPT + "inf,ChatGPT,1,1,2,log\n", r"b\.csv:5: 'inf'"),
        ("m.jsonl", '{"input_length": 5, "output_length": -1, "timestamp": 0}\n', r"m\.jsonl:1: output_length"),
        ("m.jsonl", '{"input_length": 5, "output_length": 1, "hash_ids": 3}\n', r"m\.jsonl:1: hash_ids"),
        ("a.csv", AZURE + "yesterday,1,2\n", r"a\.csv:4: 'yesterday'"),
        ("a.csv", AZURE + "2023-11-16 18:17:05,many,2\n", r"a\.csv:4: input tokens"),
        ("b.csv", BURSTGPT + "x,ChatGPT,1,1,2,log\n", r"b\.csv:5: 'x'"),
        ("s.json", "[{]", r"s\.json:1 is not JSON"),
        ("s.json", '[{"conversations": 3}]', "conversation 1"),
        ("s.json", '[{"conversations": [{"from": "human"}]}]', "conversation 1"),
        ("s.json", "[]", "holds no requests"),
        ("x.txt", "hello", "no known format"),
        ("x.txt", "", "is empty"),
    ],
)
def test_a_broken_file_is_refused_with_the_place(tmp_path, name, text, told):
    with pytest.raises(ConfigError, match=told):
        load_dataset(write(tmp_path, name, text))


def test_files_that_cannot_be_read_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot read"):
        load_dataset(tmp_path / "none.jsonl")
    with pytest.raises(ConfigError, match="unknown dataset format"):
        load_dataset(tmp_path / "none.jsonl", "parquet")
    path = tmp_path / "latin.jsonl"
    path.write_bytes(b'{"prompt": "\xe9"}\n')
    with pytest.raises(ConfigError, match="UTF-8"):
        load_dataset(path)
    with pytest.raises(ConfigError, match="no column"):
        load_dataset(write(tmp_path, "c.csv", "a,b\n1,2\n"), "azure")


def test_a_byte_order_mark_is_no_part_of_the_data(tmp_path):
    path = tmp_path / "bom.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\n')
    assert detect_format(path) == "jsonl"
    assert load_dataset(path).entries[0].turns[0].text == "a"
