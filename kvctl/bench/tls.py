"""The one TLS configuration of all that talks to the measured server: preflight, load, metrics. Floor 3."""

import contextlib
import ssl


def tls_context(verify: bool) -> ssl.SSLContext:
    """Trusts the system's authorities and those that certifi brings (a slim container has none); or anybody."""
    context = ssl.create_default_context()
    with contextlib.suppress(ImportError):  # it comes with httpx, which may do without it one day
        import certifi

        context.load_verify_locations(certifi.where())
    context.set_alpn_protocols(["http/1.1"])
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
