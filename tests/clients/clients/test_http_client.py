"""The process's one HTTP client: what it costs to make, and when a connection is given up."""

import ssl

import httpx
import pytest

from trackway.clients import close_shared_http, shared_http

pytestmark = [pytest.mark.slow, pytest.mark.anyio]


async def test_certificates_are_loaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[ssl.SSLContext] = []
    load = ssl.SSLContext.load_verify_locations

    def count(context: ssl.SSLContext, *args: str, **kwargs: str) -> None:
        loaded.append(context)
        load(context, *args, **kwargs)

    monkeypatch.setattr(ssl.SSLContext, "load_verify_locations", count)
    with pytest.raises(httpx.TransportError):
        await shared_http().get("https://127.0.0.1:1")
    await close_shared_http()
    assert len(loaded) == 1
