import httpx
import pytest
from tests.server.conftest import MODEL, connect


async def test_every_simple_endpoint_answers(client):
    health = (await client.get("/health")).json()
    assert health["status"] == "ok" and health["is_alive"] and health["engine"]["num_blocks"] == 101
    assert (await client.get("/version")).json() == {"version": "0.1.0"}
    assert (await client.get("/load")).json() == {"server_load": 0}
    assert (await client.get("/ping")).status_code == (await client.post("/ping")).status_code == 200
    assert "swagger" in (await client.get("/docs")).text
    metrics = await client.get("/metrics")
    assert "vllm:num_requests_running" in metrics.text and metrics.headers["content-type"].startswith("text/plain")


async def test_models_lists_all_names_with_the_model_length(client):
    answer = (await client.get("/v1/models")).json()
    assert answer["object"] == "list" and [card["id"] for card in answer["data"]] == [MODEL, "alias"]
    assert {card["max_model_len"] for card in answer["data"]} == {256}
    assert (await client.get("/v1/models/alias")).json()["id"] == "alias"
    assert (await client.get("/v1/models/other")).json()["error"]["type"] == "NotFoundError"


async def test_completion_defaults_to_sixteen_tokens(client):
    answer = (await client.post("/v1/completions", json={"model": MODEL, "prompt": "abc"})).json()
    assert answer["object"] == "text_completion" and answer["id"].startswith("cmpl-")
    assert answer["choices"][0]["text"] == "abcabcabcabcabca"
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 16,
        "total_tokens": 19,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
