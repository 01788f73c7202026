import asyncio
import threading

import pytest
from prometheus_client.parser import text_string_to_metric_families

import kvctl
from tests.server.conftest import MODEL, connect
from tests.server.live import read_head, request, running


async def test_every_simple_endpoint_answers(client):
    health = (await client.get("/health")).json()
    assert health["status"] == "ok" and health["is_alive"] and health["engine"]["num_blocks"] == 101
    assert (await client.get("/version")).json() == {"version": kvctl.__version__}
    assert (await client.get("/load")).json() == {"server_load": 0}
    assert (await client.get("/ping")).status_code == (await client.post("/ping")).status_code == 200
    assert "swagger" in (await client.get("/docs")).text


async def test_metrics_are_read_by_prometheus_own_parser(client):
    page = await client.get("/metrics")
    assert page.headers["content-type"].startswith("text/plain; version=0.0.4")
    names = {family.name for family in text_string_to_metric_families(page.text)}
    assert {"vllm:num_requests_running", "vllm:admission_rejections", "process_cpu_seconds"} <= names


async def test_models_lists_all_names_with_the_model_length(client):
    answer = (await client.get("/v1/models")).json()
    assert answer["object"] == "list" and [card["id"] for card in answer["data"]] == [MODEL, "alias"]
    assert {card["max_model_len"] for card in answer["data"]} == {256}
    assert (await client.get("/v1/models/alias")).json()["id"] == "alias"
    unknown = await client.get("/v1/models/other/name")
    assert unknown.status_code == 404 and unknown.json()["error"]["type"] == "NotFoundError"


async def test_health_says_503_while_the_engine_does_not_get_on(client, context):
    assert (await client.get("/health")).json()["reason"] is None
    context.engine.stall = "the engine has work and has not finished a step for 75 s"
    stalled = await client.get("/health")
    assert stalled.status_code == 503 and stalled.headers["retry-after"]
    assert stalled.json()["status"] == "stalled" and "75 s" in stalled.json()["reason"] and stalled.json()["is_alive"]
    assert (await client.get("/ping")).status_code == 503
    context.engine.stall = None
    assert (await client.get("/health")).status_code == 200


async def test_health_says_503_when_the_engine_is_dead_and_while_draining(client, context):
    context.is_draining = True
    draining = await client.get("/health")
    assert draining.status_code == 503 and draining.json()["reason"] == "the server is shutting down"
    refused = await client.post("/v1/completions", json={"prompt": "a"})
    assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
    context.is_draining = False
    context.engine.die()
    dead = await client.get("/health")
    assert dead.status_code == 503 and dead.json()["status"] == "dead" and not dead.json()["is_alive"]
    assert (await client.get("/ping")).status_code == 503
    refused = await client.post("/v1/completions", json={"prompt": "a"})
    assert refused.status_code == 503 and refused.json()["error"]["type"] == "ServiceUnavailableError"


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("GET", "/nowhere", 404, "Not Found"),
        ("POST", "/v1/embeddings", 404, "Not Found"),
        ("GET", "/v1/completions", 405, "Method Not Allowed"),
        ("DELETE", "/health", 405, "Method Not Allowed"),
    ],
)
async def test_unknown_routes_and_methods_get_an_error_object(client, method, path, status, kind):
    answer = await client.request(method, path)
    assert answer.status_code == status
    assert answer.json()["error"]["type"] == kind and answer.json()["error"]["code"] == status
    assert status == 404 or answer.headers["allow"]


class TestApiKey:
    async def test_guards_v1_and_nothing_else(self, make_context):
        async with connect(make_context(api_keys=("secret", "other"))) as client:
            for path in ("/v1/models", "/v1", "/v1/nowhere"):
                refused = await client.get(path)
                assert refused.status_code == 401 and refused.json() == {"error": "Unauthorized"}
            for path in ("/health", "/metrics", "/version", "/docs", "/openapi.json"):
                assert (await client.get(path)).status_code == 200
            assert (await client.options("/v1/models")).status_code == 405

    @pytest.mark.parametrize(
        ("header", "is_let_in"),
        [
            ("Bearer secret", True),
            ("bearer other", True),
            ("Bearer secret2", False),
            ("Bearer", False),
            ("Bearer ", False),
            ("Basic secret", False),
            ("secret", False),
            ("", False),
        ],
    )
    async def test_needs_one_of_the_keys(self, make_context, header, is_let_in):
        async with connect(make_context(api_keys=("secret", "other"))) as client:
            answer = await client.get("/v1/models", headers={"Authorization": header})
            assert (answer.status_code == 200) is is_let_in


async def test_a_path_prefix_of_a_proxy_hides_no_guarded_path(make_context):
    context = make_context(api_keys=("secret",), root_path="/proxied")
    async with running(context) as (_, port):
        for target in ("/v1/models", "/v1%2Fmodels", "http://x/v1/models", "/proxied/v1/models", "//v1/models"):
            reader, writer = await request(port, f"GET {target} HTTP/1.1\nHost: x")
            assert (await read_head(reader))[0] in (401, 404), target
            writer.close()
        reader, writer = await request(port, "GET /v1/models HTTP/1.1\nHost: x\nAuthorization: Bearer secret")
        assert (await read_head(reader))[0] == 200
        writer.close()


async def test_request_ids_come_back_where_the_operator_wants_them(make_context):
    async with connect(make_context(request_id_headers=True)) as client:
        for path, body in (("/v1/completions", {"prompt": "a"}), ("/v1/completions", {"prompt": "a", "stream": True})):
            answer = await client.post(path, json=body, headers={"X-Request-Id": "mine"})
            assert answer.headers["x-request-id"] == "mine" and "cmpl-mine" in answer.text
            own = await client.post(path, json=body)
            assert f"cmpl-{own.headers['x-request-id']}" in own.text
        odd = await client.get("/version", headers={"X-Request-Id": "has spaces"})
        assert odd.headers["x-request-id"] != "has spaces"
    async with connect(make_context()) as client:
        assert "x-request-id" not in (await client.get("/version")).headers
        odd_id = "line\r\nbreak \u2603"
        answer = await client.post("/v1/completions", json={"prompt": "a", "request_id": odd_id, "stream": True})
        assert answer.status_code == 200


async def test_browsers_of_an_allowed_origin_may_call(make_context):
    async with connect(make_context(allowed_origins=("https://app.example",), api_keys=("k",))) as client:
        preflight = await client.options(
            "/v1/chat/completions",
            headers={"Origin": "https://app.example", "Access-Control-Request-Method": "POST"},
        )
        assert preflight.headers["access-control-allow-origin"] == "https://app.example"
        refused = await client.get("/v1/models", headers={"Origin": "https://app.example"})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "https://app.example"  # so that a browser may read it
    async with connect(make_context()) as client:
        answer = await client.get("/version", headers={"Origin": "https://app.example"})
        assert "access-control-allow-origin" not in answer.headers


async def test_a_full_server_turns_newcomers_away_and_counts_them(make_context):
    context = make_context(max_in_flight=0)
    async with connect(context) as client:
        for path, body in (
            ("/v1/completions", {"prompt": "a"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ):
            answer = await client.post(path, json=body)
            assert answer.status_code == 503 and int(answer.headers["retry-after"]) >= 1
            assert answer.json()["error"]["type"] == "ServiceUnavailableError"
        assert (await client.get("/v1/models")).status_code == 200
    assert context.admission.in_flight == 0 and not context.engine.seen


async def test_a_bug_of_ours_is_a_500_without_details(client, context, caplog):
    def broken(*_args, **_kwargs):
        raise ZeroDivisionError("internal detail")

    context.engine.generate = broken
    answer = await client.post("/v1/completions", json={"prompt": "a"})
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "InternalServerError" and "detail" not in answer.text
    assert "internal detail" in caplog.text
    assert context.admission.in_flight == 0


async def test_tokenize_and_detokenize_are_inverse(client):
    tokens = (await client.post("/tokenize", json={"prompt": "héllo", "return_token_strs": True})).json()
    assert tokens["tokens"] == list("héllo".encode()) and tokens["count"] == 6 and tokens["max_model_len"] == 256
    assert tokens["token_strs"][0] == "h"
    text = (await client.post("/detokenize", json={"tokens": tokens["tokens"]})).json()
    assert text == {"prompt": "héllo"}


async def test_tokenize_renders_a_conversation_as_chat_does(client, context):
    messages = [{"role": "user", "content": "hi"}]
    tokens = (await client.post("/tokenize", json={"messages": messages})).json()["tokens"]
    await client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1})
    assert context.engine.seen[0][0] == tokens
    assert (await client.post("/detokenize", json={"tokens": tokens})).json()["prompt"] == "<user>hi</s><assistant>"


async def test_detokenize_of_a_long_list_says_the_same(client):
    answer = await client.post("/detokenize", json={"tokens": [97] * 5000})
    assert answer.json()["prompt"] == "a" * 5000


async def test_tokenizing_without_a_key_leaves_threads_for_those_who_have_one(context, client, monkeypatch):
    working, most, gate = set(), [], threading.Event()
    encode = context.tokenizer.encode

    def slow(text, **options):
        working.add(text)
        most.append(len(working & {"x" * 5000 + str(i) for i in range(9)}))
        assert text[0] != "x" or gate.wait(10)
        working.discard(text)
        return encode(text[:200], **options)

    monkeypatch.setattr(context.tokenizer, "encode", slow)
    keyless = [asyncio.create_task(client.post("/tokenize", json={"prompt": "x" * 5000 + str(i)})) for i in range(9)]
    served = await client.post("/v1/completions", json={"prompt": "y" * 3000, "max_tokens": 1})
    assert served.status_code == 200 and not gate.is_set()
    gate.set()
    assert {(await answer).status_code for answer in keyless} == {200}
    assert max(most) == 1


async def test_detokenize_refuses_ids_outside_the_vocabulary(client):
    answer = await client.post("/detokenize", json={"tokens": [1, 259]})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "tokens"


async def test_the_document_describes_every_route(client):
    document = (await client.get("/openapi.json")).json()
    assert document["openapi"].startswith("3.1")
    for path, operations in document["paths"].items():
        for method in operations:
            answer = await client.request(method, path.replace("{model_id}", MODEL))
            assert answer.status_code not in (404, 405), (method, path)
    fields = document["components"]["schemas"]["ChatCompletionRequest"]["properties"]
    assert {"messages", "temperature", "cache_salt", "top_logprobs"} <= set(fields)
