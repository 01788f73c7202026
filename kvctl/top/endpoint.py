"""The address of a metrics page, from whatever a person types. Pure; opens nothing. Floor 3."""

from dataclasses import dataclass
from urllib.parse import urlsplit

from kvctl.errors import ConfigError

DEFAULT_URL = "http://127.0.0.1:8000"
_DEFAULT_PATHS = ("/metrics", "/prometheus/metrics")  # the second is TensorRT-LLM's
_FORMS = "Give host:port, http://host:port or a whole address such as http://host:8000/metrics."


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where to ask. Only the first of `paths` is used where the user named one; else they are tried in turn."""

    scheme: str  # "http" or "https"
    host: str
    port: int
    paths: tuple[str, ...]

    @property
    def label(self) -> str:
        """Return what to call it on the screen: host:port, and a path of the user's own."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        shown = "" if self.paths[0] in _DEFAULT_PATHS else self.paths[0]
        return f"{host}:{self.port}{shown}"

    @property
    def url(self) -> str:
        """Return the address that is asked first."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}{self.paths[0]}"


def parse_endpoint(text: str) -> Endpoint:
    """Read `host:port`, `:8000`, `http://host` or a full address.

    Raises:
        ConfigError: no address.
    """
    given = text.strip()
    if not given or any(ch.isspace() or ord(ch) < 32 for ch in given):
        raise ConfigError(f"{text!r} is not an address", hint=_FORMS)
    if "://" not in given:
        given = f"http://127.0.0.1{given}" if given.startswith(":") else f"http://{given}"
    try:
        parts = urlsplit(given)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"{text!r} is not an address: {error}", hint=_FORMS) from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{text!r} is not an http address", hint=_FORMS)
    if parts.username or parts.password:
        raise ConfigError("the address holds a password", hint="Put it into --header, or the key into KVCTL_API_KEY.")
    path = parts.path + (f"?{parts.query}" if parts.query else "")
    default_port = 443 if parts.scheme == "https" else 80
    paths = _DEFAULT_PATHS if path in ("", "/", "/v1", "/v1/") else (path,)
    return Endpoint(parts.scheme, parts.hostname, port or default_port, paths)
