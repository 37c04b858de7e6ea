"""Answers of an OTLP receiver that are too long or too slow."""

import contextlib
import gzip
import socket
import threading
import tracemalloc
from collections.abc import Iterator

import pytest

from tests.time_limits import ENDS_SOON
from trackway.tracing.export.otlp import MOST_BYTES, Batch, Endpoint, SendOutcome

BOMB = gzip.compress(b"\0" * 100_000_000)
HEAD = b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: %d\r\n\r\n" % len(BOMB)


@contextlib.contextmanager
def receiver(answer: bytes, then: bytes = b"x" * MOST_BYTES, every_s: float = 0.0) -> Iterator[str]:
    """The URL of a server that gives each request this answer, and sends more of it until the client leaves."""

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listening.accept()
                with connection, contextlib.suppress(OSError):
                    connection.recv(65_536)
                    connection.sendall(answer)
                    while b"content-length" not in answer[:200]:
                        connection.sendall(then)
                        left.wait(every_s)

    left = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/v1/traces"
        left.set()
        listening.shutdown(socket.SHUT_RDWR)
        thread.join(60)


@ENDS_SOON
@pytest.mark.parametrize("answer", [b"HTTP/1.1 200 OK\r\nx-slow: ", b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n"])
def test_an_answer_of_one_byte_at_a_time_ends_at_the_deadline(answer: bytes) -> None:
    with receiver(answer, b"a", 0.02) as url:
        endpoint = Endpoint(lambda: url, {}, 0.3)
        found = endpoint.post(Batch({}, b"", 1))
        endpoint.close()

    late = "TimeoutError: expected the whole answer within 0.3 s, got a part"
    assert (found.verdict, found.answered, found.reason) == (SendOutcome.LATER, False, late)


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
