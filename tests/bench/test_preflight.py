"""What is found out before the clock runs, and how servers that are none are told from those that are."""

import json
import socket
import ssl
import subprocess
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from kvctl.bench.client import ClientConfig
from kvctl.bench.load_process import run_load
from kvctl.bench.preflight import PreflightClient
from kvctl.bench.run_config import RequestConfig
from kvctl.errors import ModelNotFound, ServerUnreachable
from kvctl.workload.prompts import PromptMaker
from tests.bench.test_load import job


def preflight(url, *, request=None, headers=None, prompt_tokens=64, **options):
    with PreflightClient(url, headers or {}, timeout_s=10, **options) as client:
        return client.run(request or RequestConfig(), prompt_tokens=prompt_tokens)


def test_the_model_and_the_cost_of_words_are_found(mock_server):
    found = preflight(mock_server(tokens=None))
    assert found.request.model == "mock"
    assert found.rate.is_one_token_per_word
    assert found.tells_usage
    assert found.notes == ()


def test_a_chat_templates_tokens_are_learned(mock_server):
    url = mock_server(tokens=None, tokens_per_word=1.3, prompt_overhead_tokens=13)
    found = preflight(url, request=RequestConfig(endpoint="chat"), prompt_tokens=300)
    with PreflightClient(url, {}) as client:
        counted = {client._count(found.request, PromptMaker(i, found.rate).prompt(300)) for i in range(5)}
    assert counted == {300}


def test_a_server_without_usage_is_noted_and_not_refused(mock_server):
    found = preflight(mock_server(usage=False))
    assert not found.tells_usage
    assert "usage" in found.notes[0]


def test_an_unknown_model_is_refused_with_those_there_are(mock_server):
    with pytest.raises(ModelNotFound, match="'gpt'") as refused:
        preflight(mock_server(), request=RequestConfig(model="gpt"))
    assert "mock" in refused.value.hint


def test_a_wrong_key_is_told(mock_server):
    url = mock_server(api_key="secret")
    with pytest.raises(ServerUnreachable, match="refuses the API key") as refused:
        preflight(url, headers={"Authorization": "Bearer wrong"})
    assert "--api-key" in refused.value.hint and "KVCTL_API_KEY" in refused.value.hint
    assert preflight(url, headers={"Authorization": "Bearer secret"}).request.model == "mock"


def test_a_server_that_is_down_is_told():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(ServerUnreachable, match="nothing answers") as refused:
        preflight(f"http://127.0.0.1:{port}")
    assert "Start the server" in refused.value.hint


@pytest.mark.parametrize("fault", ["html", "error", "500"])
def test_a_server_that_fails_the_test_request_is_told(mock_server, fault):
    with pytest.raises(ServerUnreachable):
        preflight(mock_server(fault=fault))


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    answers = None

    def do_GET(self):
        self.answer(*self.server.answer("GET", self.path, None))

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.answer(*self.server.answer("POST", self.path, body))

    def answer(self, status, kind, text):
        data = text.encode()
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


@pytest.fixture
def serve():
    servers = []

    def start(answer, context=None):
        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.answer = answer
        server.handle_error = lambda *_: None
        if context is not None:
            server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        servers.append((server, thread))
        return f"{'https' if context else 'http'}://127.0.0.1:{server.server_port}"

    yield start
    for server, thread in servers:
        server.shutdown()
        server.server_close()
        thread.join()


def test_an_overloaded_server_is_asked_again_when_it_says(serve, monkeypatch):
    asked, waits, said = [], [], []

    def answer(method, path, body):
        if method == "GET":
            return MODELS
        asked.append(path)
        status = 503 if len(asked) < 3 else 200
        return (200, "text/event-stream", STREAM) if status == 200 else (503, "application/json", "{}")

    monkeypatch.setattr("kvctl.bench.preflight.time.sleep", waits.append)
    with PreflightClient(serve(answer), {}, timeout_s=10, say=said.append) as client:
        assert client.run(RequestConfig(), prompt_tokens=None).request.model == "m"
    assert waits == [1.0, 1.0]
    assert "overloaded" in said[0]
    with (
        pytest.raises(ServerUnreachable, match="HTTP 503"),
        PreflightClient(
            serve(lambda method, *_: MODELS if method == "GET" else (503, "application/json", "{}")), {}, timeout_s=10
        ) as client,
    ):
        client.run(RequestConfig(), prompt_tokens=None)


MODELS = (200, "application/json", '{"data": [{"id": "m"}]}')
STREAM = 'data: {"choices": [{"text": "a"}], "usage": {"prompt_tokens": 5, "completion_tokens": 1}}\n\ndata: [DONE]\n\n'


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ((200, "text/html", "<html>Welcome to nginx!</html>"), "not an OpenAI-compatible server"),
        ((404, "text/plain", "nope"), "not an OpenAI-compatible server"),
        ((200, "application/json", '{"hello": 1}'), "no list of models"),
        ((200, "application/json", "[1]"), "no list of models"),
        ((200, "application/json", '{"data": []}'), "serves no model"),
    ],
)
def test_what_is_no_openai_server_is_told_apart(serve, answer, told):
    url = serve(lambda *_: answer)
    with pytest.raises((ServerUnreachable, ModelNotFound), match=told):
        preflight(url)


def test_fields_that_are_refused_are_left_out_one_by_one(serve):
    def answer(method, path, body):
        if method == "GET":
            return MODELS
        if not body.get("stream"):
            return 200, "application/json", json.dumps({"usage": {"prompt_tokens": 5}})
        for name in ("ignore_eos", "temperature", "stream_options"):
            if name in body:
                return 400, "application/json", json.dumps({"error": {"message": f"Unknown parameter: {name}"}})
        return 200, "text/event-stream", STREAM

    found = preflight(serve(answer))
    assert not found.request.ignore_eos
    assert found.request.temperature is None
    assert not found.request.include_usage
    assert len([note for note in found.notes if "refuses" in note]) == 3


def test_max_completion_tokens_is_used_where_it_is_asked_for(serve):
    def answer(method, path, body):
        if method == "GET":
            return MODELS
        if "max_tokens" in body:
            message = "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead."
            return 400, "application/json", json.dumps({"error": {"message": message}})
        return 200, "text/event-stream", STREAM

    found = preflight(serve(answer), request=RequestConfig(endpoint="chat"), prompt_tokens=None)
    assert found.request.limit_field == "max_completion_tokens"


def test_chat_is_used_where_there_are_no_completions(serve):
    def answer(method, path, body):
        if method == "GET":
            return MODELS
        return (200, "text/event-stream", STREAM) if "chat" in path else (404, "text/plain", "Not Found")

    found = preflight(serve(answer), prompt_tokens=None)
    assert found.request.endpoint == "chat"


def test_a_request_that_is_refused_for_good_is_told_with_what_was_said(serve):
    def answer(method, path, body):
        return MODELS if method == "GET" else (400, "application/json", '{"error": {"message": "no room today"}}')

    with pytest.raises(ServerUnreachable, match="no room today"):
        preflight(serve(answer))


def test_a_server_without_a_list_of_models_needs_a_name(serve):
    def answer(method, path, body):
        return (404, "text/plain", "no") if method == "GET" else (200, "text/event-stream", STREAM)

    found = preflight(serve(answer), request=RequestConfig(model="given"), prompt_tokens=None)
    assert found.request.model == "given"


def test_counts_that_make_no_sense_never_fail_the_run(serve):
    def answer(method, path, body):
        if method == "GET":
            return MODELS
        if body.get("stream"):
            return 200, "text/event-stream", STREAM
        return 200, "application/json", '{"usage": {"prompt_tokens": 5}}'

    found = preflight(serve(answer))
    assert "could not be learned" in found.notes[-1]


def test_a_self_signed_certificate_is_refused_and_accepted_with_insecure(serve, tmp_path):
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1"]
    subprocess.run([*command, "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    url = serve(lambda method, *_: MODELS if method == "GET" else (200, "text/event-stream", STREAM), context)
    with pytest.raises(ServerUnreachable, match="no TLS") as refused:
        preflight(url)
    assert "--insecure" in refused.value.hint
    assert preflight(url, verify_tls=False, prompt_tokens=None).request.model == "m"

    strict = job(url, num_requests=2, concurrency=1, max_error_rate=None)
    assert dict(run_load(strict).errors) == {"tls": 2}
    measured = run_load(replace(strict, client=ClientConfig(url, verify_tls=False)))
    assert not measured.errors
    assert not measured.uses_kernel_clock
    assert measured.lags.count > 0 or measured.end_s - measured.start_s < 0.05
