"""The demo model behind the API, as a newcomer meets it."""

from pathlib import Path

import httpx
import openai
import pytest

from tests.support.serve_process import ServeProcess

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def demo(demo_folder: Path):
    with ServeProcess(
        demo_folder, "--dtype", "float32", "--served-model-name", "demo", "--max-model-len", "2k"
    ) as server:
        yield server


def test_it_knows_the_capital_of_france_streamed_and_whole(demo):
    with openai.OpenAI(base_url=f"{demo.url}/v1", api_key="none", max_retries=0) as client:
        whole = client.chat.completions.create(model="demo", messages=QUESTION, max_tokens=20, temperature=0)
        chunks = client.chat.completions.create(
            model="demo", messages=QUESTION, max_tokens=20, temperature=0, stream=True
        )
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert whole.choices[0].message.content == streamed == "The capital of France is Paris."
    assert whole.choices[0].finish_reason == "stop"


def test_a_follow_up_finds_the_conversation_in_the_prefix_cache(demo):
    answer = {"role": "assistant", "content": "The capital of France is Paris."}
    messages = [*QUESTION, answer, {"role": "user", "content": "And of Italy?"}]
    body = {"messages": messages, "max_tokens": 8, "temperature": 0}
    usage = httpx.post(f"{demo.url}/v1/chat/completions", json=body, timeout=60).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= 32


def test_the_prompt_is_what_transformers_makes_of_it(demo, demo_folder):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(demo_folder), local_files_only=True)
    expected = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_dict=True)["input_ids"]
    answer = httpx.post(f"{demo.url}/tokenize", json={"messages": QUESTION}).json()
    assert answer["tokens"] == expected and answer["max_model_len"] == 2000
    text = "Numbers 12345, naïve café, 日本語, emoji 🙂, and    spaces.\n\tTabs"
    answer = httpx.post(f"{demo.url}/tokenize", json={"prompt": text}).json()
    assert answer["tokens"] == tokenizer(text)["input_ids"]
    assert httpx.post(f"{demo.url}/detokenize", json={"tokens": answer["tokens"]}).json()["prompt"] == text
