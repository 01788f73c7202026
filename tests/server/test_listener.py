import resource
import socket

import pytest

from kvctl.errors import ConfigError, KvctlError
from kvctl.server.config import NetworkOptions
from kvctl.server.listener import bind, check_tls, listen, raise_file_limit, url_of


def test_a_free_port_is_found_named_and_answers_only_when_told_to():
    with bind(NetworkOptions(port=0)) as listener:
        port = listener.getsockname()[1]
        assert url_of(listener, NetworkOptions(port=0)) == f"http://127.0.0.1:{port}"
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
        listen(listener)
        with socket.create_connection(("127.0.0.1", port)):
            pass


def test_all_addresses_are_shown_as_localhost():
    with bind(NetworkOptions(host="0.0.0.0", port=0)) as listener:
        assert url_of(listener, NetworkOptions()).startswith("http://localhost:")


def test_a_taken_port_and_an_unknown_host_say_what_to_do():
    with bind(NetworkOptions(port=0)) as listener:
        listen(listener)
        port = listener.getsockname()[1]
        with pytest.raises(KvctlError, match=f"port {port}: Address already in use") as caught:
            bind(NetworkOptions(port=port))
        assert "--port" in caught.value.hint
    with pytest.raises(KvctlError, match=r"cannot listen on 203\.0\.113\.1"):
        bind(NetworkOptions(host="203.0.113.1"))


def test_a_left_over_unix_socket_is_replaced_and_a_living_one_is_not(tmp_path):
    path = str(tmp_path / "s")
    network = NetworkOptions(uds=path)
    bind(network).close()  # leaves the file behind
    with bind(network) as listener:
        listen(listener)
        assert url_of(listener, network) == f"unix:{path}"
        with pytest.raises(KvctlError, match="Address already in use"):
            bind(network)
    file = tmp_path / "file"
    file.write_text("precious")
    with pytest.raises(KvctlError):
        bind(NetworkOptions(uds=str(file)))
    assert file.read_text() == "precious"


def test_the_limit_of_open_files_is_raised_as_far_as_allowed():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        assert raise_file_limit() == (65_536 if hard == resource.RLIM_INFINITY else min(65_536, hard))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_of_two_that_took_an_address_at_once_one_is_told():
    with bind(NetworkOptions(port=0)) as first:
        port = first.getsockname()[1]
        with bind(NetworkOptions(port=port)) as second:
            listen(first)
            with pytest.raises(KvctlError, match="cannot listen"):
                listen(second)


def test_tls_files_are_checked_early(tmp_path):
    check_tls(NetworkOptions())
    broken = tmp_path / "cert.pem"
    broken.write_text("no certificate")
    for network in (
        NetworkOptions(ssl_certfile="/no/such/file"),
        NetworkOptions(ssl_certfile=str(broken)),
        NetworkOptions(ssl_keyfile=str(broken)),
    ):
        with pytest.raises(ConfigError):
            check_tls(network)
