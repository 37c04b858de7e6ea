"""Answers of an OTLP receiver that are too long: only their beginning is read."""

import contextlib
import gzip
import socket
import threading
import tracemalloc
from collections.abc import Iterator

import pytest

from trackway.tracing.export.batch import Batch
from trackway.tracing.export.otlp_http import MOST_BYTES, Endpoint, SendOutcome

BOMB = gzip.compress(b"\0" * 100_000_000)
HEAD = b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: %d\r\n\r\n" % len(BOMB)


@contextlib.contextmanager
def receiver(answer: bytes) -> Iterator[str]:
    """The URL of a server that gives each request this answer, over and over until the client leaves."""

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listening.accept()
                with connection, contextlib.suppress(OSError):
                    connection.recv(65_536)
                    connection.sendall(answer)
                    while b"content-length" not in answer[:200]:
                        connection.sendall(b"x" * MOST_BYTES)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/v1/traces"
        listening.shutdown(socket.SHUT_RDWR)
        thread.join(10)


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (HEAD + BOMB, SendOutcome.TAKEN),
        (b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n", SendOutcome.TAKEN),
        (b"HTTP/1.1 500 Broken\r\nconnection: close\r\n\r\n", SendOutcome.LATER),
    ],
    ids=["bomb", "endless", "endless error"],
)
def test_the_beginning_of_an_answer_is_read(answer: bytes, outcome: SendOutcome) -> None:
    with receiver(answer) as url:
        endpoint = Endpoint(lambda: url, {}, 10.0)
        tracemalloc.start()
        found = endpoint.post(Batch({}, b"", 1))
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        endpoint.close()

    assert (found.verdict, len(found.reason) < 300) == (outcome, True)
    assert most < 2_000_000
