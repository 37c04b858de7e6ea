"""Questions to a service that may not be there yet."""

import ssl
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from tests.serving import answered_by
from trackway.deploy.deployment.processes import answers, tls
from trackway.system import free_port


class _Ready(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/ready" else 503)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


def test_only_200_is_an_answer() -> None:
    with answered_by(HTTPServer(("127.0.0.1", 0), _Ready)) as url:
        answered = (answers(f"{url}/ready"), answers(f"{url}/loading"))

    assert (answered, answers(f"http://127.0.0.1:{free_port()}")) == ((True, False), False)


def test_certificates_are_loaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[ssl.SSLContext] = []
    this_thread = threading.get_ident()
    load = ssl.SSLContext.load_verify_locations

    def count(context: ssl.SSLContext, *args: str, **kwargs: str) -> None:
        if threading.get_ident() == this_thread:  # others load their own
            loaded.append(context)
        load(context, *args, **kwargs)

    monkeypatch.setattr(ssl.SSLContext, "load_verify_locations", count)
    tls.cache_clear()
    for _ in range(3):
        answers(f"http://127.0.0.1:{free_port()}")

    assert loaded == [tls()]
