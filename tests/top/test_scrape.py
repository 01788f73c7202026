"""The fetcher against servers that behave, and against servers that do not."""

import socket
import ssl
import subprocess
import threading

import pytest

from kvctl.errors import ConfigError
from kvctl.top.endpoint import parse_endpoint
from kvctl.top.scrape import ScrapeOptions, Scraper, SteadyClock
from tests.top.page_server import PageServer, page

GOOD = "vllm:num_requests_running 1\n"


def fetch(server_or_url, times=1, **options):
    url = server_or_url if isinstance(server_or_url, str) else server_or_url.url
    settings = {"headers": {}, "timeout_s": 0.5, **options}
    scraper = Scraper(parse_endpoint(url), ScrapeOptions(**settings), SteadyClock())
    try:
        for _ in range(times):
            scrape = scraper.scrape()
    finally:
        scraper.close()
    return scrape


def test_one_connection_serves_many_scrapes_and_only_get_is_ever_sent():
    with PageServer({"/metrics": page(GOOD)}) as server:
        assert fetch(server, times=5).text == GOOD
        assert server.num_connections == 1
        assert [(method, path) for method, path, _ in server.asked] == [("GET", "/metrics")] * 5


def test_headers_and_the_key_are_sent():
    with PageServer({"/metrics": page(GOOD)}) as server:
        fetch(server, headers={"X-Team": "search"}, api_key="secret")
        headers = server.asked[0][2]
    assert headers["X-Team"] == "search"
    assert headers["Authorization"] == "Bearer secret"


def test_a_server_that_comes_back_is_found_again():
    with PageServer({"/metrics": page(GOOD)}) as server:
        endpoint = parse_endpoint(server.url)
        scraper = Scraper(endpoint, ScrapeOptions({}, timeout_s=0.5), SteadyClock())
        assert scraper.scrape().text == GOOD
    assert scraper.scrape().error is not None
    again = PageServer({"/metrics": page(GOOD)})
    with again:
        other = Scraper(parse_endpoint(again.url), ScrapeOptions({}, timeout_s=0.5), SteadyClock())
        assert other.scrape().text == GOOD
        other.close()
    scraper.close()


def test_a_connection_that_the_server_closed_in_between_costs_no_scrape():
    def close_after(request):
        page(GOOD)(request)
        request.close_connection = True

    with PageServer({"/metrics": close_after}) as server:
        scraper = Scraper(parse_endpoint(server.url), ScrapeOptions({}, timeout_s=0.5), SteadyClock())
        assert [scraper.scrape().text for _ in range(3)] == [GOOD] * 3
        scraper.close()
        assert server.num_connections == 3


def test_tensorrt_llms_other_path_is_tried_and_kept():
    answers = {"/metrics": page('[{"iter": 1}]'), "/prometheus/metrics": page("trtllm_num_requests_running 1\n")}
    with PageServer(answers) as server:
        assert fetch(server, times=2).text.startswith("trtllm")
        assert [path for _, path, _ in server.asked] == ["/metrics", "/prometheus/metrics", "/prometheus/metrics"]


def test_redirects_are_followed_here_and_nowhere_else():
    def redirect(target):
        def answer(request):
            request.send_response(307)
            request.send_header("Location", target)
            request.send_header("Content-Length", "0")
            request.end_headers()

        return answer

    answers = {
        "/metrics": redirect("/metrics/"),
        "/metrics/": page(GOOD),
        "/away": redirect("http://example.invalid/metrics"),
        "/round": redirect("/round"),
    }
    with PageServer(answers) as server:
        assert fetch(server, api_key="secret").text == GOOD
        assert "another host" in fetch(f"{server.url}/away", api_key="secret").error
        assert "circle" in fetch(f"{server.url}/round").error


def endless(request):
    request.send_response(200)
    request.end_headers()
    while True:
        request.wfile.write(b"a_metric 1\n" * 5000)


def dripping(request):
    request.send_response(200)
    request.end_headers()
    while not request.is_closing.wait(0.05):
        request.wfile.write(b"a")
        request.wfile.flush()


def silent(request):
    request.is_closing.wait(5)


def test_an_endless_page_is_given_up_at_the_limit():
    with PageServer({"/metrics": endless}) as server:
        scrape = fetch(server, max_bytes=1 << 20, timeout_s=20)
        assert scrape.error == "the page is larger than 1 MiB"


def test_a_page_that_breaks_off_is_no_page():
    def broken(request):
        request.send_response(200)
        request.send_header("Content-Length", "1000")
        request.end_headers()
        request.wfile.write(b"vllm:num_requests_running 1\n")
        request.close_connection = True

    with PageServer({"/metrics": broken}) as server:
        assert fetch(server).error == "the page broke off"


@pytest.mark.parametrize("answer", [dripping, silent], ids=["dripping", "silent"])
def test_a_page_that_does_not_end_in_time_is_given_up(answer):
    with PageServer({"/metrics": answer}) as server:
        scrape = fetch(server, timeout_s=0.3)
        assert scrape.error == "no answer in 0.3 s"
        assert scrape.duration_s < 2


def test_a_server_that_drips_its_headers_is_given_up():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        stop = threading.Event()

        def drip():
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"HTTP/1.1 200 OK\r\n")
                while not stop.wait(0.05):
                    try:
                        connection.sendall(b"X")
                    except OSError:
                        return

        thread = threading.Thread(target=drip, daemon=True)
        thread.start()
        scrape = fetch(f"http://127.0.0.1:{listener.getsockname()[1]}", timeout_s=0.4)
        stop.set()
        thread.join(5)
    assert scrape.error == "no answer in 0.4 s"


@pytest.mark.parametrize(
    ("answers", "says"),
    [
        ({}, "HTTP 404 at"),
        ({"/metrics": page("no", 401)}, "HTTP 401 at /metrics"),
        ({"/metrics": page("oops", 500)}, "HTTP 500"),
        ({"/metrics": page("{}"), "/prometheus/metrics": page("[]")}, "JSON, not metrics"),
    ],
)
def test_other_answers_are_named(answers, says):
    with PageServer(answers) as server:
        assert says in fetch(server).error


def test_nobody_there_and_no_such_host_are_told_apart():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    assert fetch(f"127.0.0.1:{port}").error == "connection refused"
    assert fetch("http://no-such-host.invalid:1").error == "unknown host"


def test_something_that_speaks_no_http_is_an_error_for_people():
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer():
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"\x1b[31mSSH-2.0\r\n\r\n")

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        error = fetch(f"127.0.0.1:{listener.getsockname()[1]}").error
        thread.join(5)
    assert error
    assert "\x1b" not in error


def test_a_self_signed_certificate_is_refused_unless_insecure(tmp_path):
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    subprocess.run([*command, "-keyout", key, "-out", cert], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    server = PageServer({"/metrics": page(GOOD)})
    server._server.socket = context.wrap_socket(server._server.socket, server_side=True)
    server._server.handle_error = lambda *_: None  # the refused handshake
    with server:
        url = f"https://127.0.0.1:{server.port}"
        assert "not trusted" in fetch(url).error
        assert fetch(url, insecure=True).text == GOOD


@pytest.mark.parametrize(
    ("text", "url", "label"),
    [
        ("localhost:8000", "http://localhost:8000/metrics", "localhost:8000"),
        (":9000", "http://127.0.0.1:9000/metrics", "127.0.0.1:9000"),
        ("http://host", "http://host:80/metrics", "host:80"),
        ("https://host/v1", "https://host:443/metrics", "host:443"),
        ("host:1/own/path?x=1", "http://host:1/own/path?x=1", "host:1/own/path?x=1"),
        ("[::1]:8000", "http://[::1]:8000/metrics", "[::1]:8000"),
    ],
)
def test_addresses_are_read_as_people_type_them(text, url, label):
    endpoint = parse_endpoint(text)
    assert (endpoint.url, endpoint.label) == (url, label)


@pytest.mark.parametrize(
    "text", ["", "ftp://host", "http://", "host:port", "host:99999", "a b", "http://u:p@host", "x\n"]
)
def test_what_is_no_address_is_refused_with_a_hint(text):
    if text == "x\n":
        assert parse_endpoint(text).host == "x"  # a stray newline from a script is trimmed
        return
    with pytest.raises(ConfigError) as caught:
        parse_endpoint(text)
    assert caught.value.hint
