"""The server's socket, and room for ten thousand connections.

The address is taken before the model loads, so that a taken one is told at once and not after a minute of loading;
it listens only when the server can answer: until then clients are refused instead of kept waiting. Floor 3.
"""

import contextlib
import os
import resource
import socket
import ssl
import stat
from pathlib import Path
from typing import Final

from kvctl.errors import ConfigError, KvctlError
from kvctl.server.config import NetworkOptions

BACKLOG: Final = 4096
WANTED_FILES: Final = 65_536


def raise_file_limit() -> int:
    """Raise this process's limit of open files as far as it may; return the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED_FILES if hard == resource.RLIM_INFINITY else min(WANTED_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def bind(network: NetworkOptions) -> socket.socket:
    """Take the address; nobody can connect yet.

    Raises:
        KvctlError: the address is taken, or cannot be had.
    """
    if network.uds is not None:
        return _bind_unix(network.uds)
    host, port = network.host, network.port
    try:
        with contextlib.ExitStack() as on_failure:
            family, kind, protocol, _, address = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            listener = on_failure.enter_context(socket.socket(family, kind, protocol))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6 and host == "::":
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            listener.bind(address)
            on_failure.pop_all()
    except OSError as error:
        reason = os.strerror(error.errno) if isinstance(error.errno, int) and error.errno > 0 else str(error)
        raise KvctlError(
            f"cannot listen on {host} port {port}: {reason}",
            hint="Stop what listens there, or give another --host or --port (0: any free one).",
        ) from None
    listener.setblocking(False)
    return listener


def _bind_unix(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if _is_left_over(path):
            Path(path).unlink()
        listener.bind(path)
    except OSError as error:
        listener.close()
        raise KvctlError(f"cannot listen on {path}: {error.strerror or error}", hint="Give another --uds.") from None
    listener.setblocking(False)
    return listener


def listen(listener: socket.socket) -> None:
    """Let clients connect.

    Raises:
        KvctlError: somebody else took the address at the same time and was quicker.
    """
    try:
        listener.listen(BACKLOG)
    except OSError as error:
        raise KvctlError(f"cannot listen: {error.strerror or error}", hint="Give another --port.") from None


def check_tls(network: NetworkOptions) -> None:
    """Read the TLS files once, before anything takes long.

    Raises:
        ConfigError: one is missing or damaged, or does not belong to the other.
    """
    if network.ssl_certfile is None:
        if network.ssl_keyfile is not None:
            raise ConfigError("--ssl-keyfile without --ssl-certfile", hint="Give both.")
        return
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(network.ssl_certfile, network.ssl_keyfile)
        if network.ssl_ca_certs is not None:
            context.load_verify_locations(network.ssl_ca_certs)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"the TLS files cannot be used: {error.strerror or error}",
            hint="Check --ssl-certfile, --ssl-keyfile and --ssl-ca-certs.",
        ) from None


def _is_left_over(path: str) -> bool:
    """Whether a socket is there that nobody listens on."""
    try:
        if not stat.S_ISSOCK(Path(path).stat().st_mode):
            return False
    except OSError:
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return True
        return False


def url_of(listener: socket.socket, network: NetworkOptions) -> str:
    """The address as a client writes it."""
    if network.uds is not None:
        return f"unix:{network.uds}"
    host, port = listener.getsockname()[:2]
    scheme = "https" if network.ssl_certfile else "http"
    host = {"0.0.0.0": "localhost", "::": "localhost"}.get(host, host)
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
