"""Requests that are repeated until something answers, as while a deployment starts."""

import ssl
from functools import cache

import httpx


@cache
def tls() -> ssl.SSLContext:
    """The TLS settings of this process: without them httpx reads all certificates for each request, http:// too."""
    return httpx.create_ssl_context(trust_env=False)


def answers(url: str, headers: dict[str, str] | None = None) -> bool:
    """Return whether a GET is answered with 200."""
    try:
        return httpx.get(url, headers=headers, timeout=5.0, trust_env=False, verify=tls()).status_code == 200
    except httpx.TransportError:
        return False
