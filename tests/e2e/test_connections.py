"""Connections whose header never ends, at Serve's proxy and at a replica's own port."""

import socket
import time

import httpx
import pytest

from trackway.deploy.deployment import serve_api
from trackway.deploy.deployment.record import Deployment

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]


def test_a_header_that_is_not_complete_is_answered_408_after_ten_seconds(deployment: Deployment) -> None:
    own_port = next(str(replica.url) for replica in serve_api.replicas_at(f"{deployment.base_url}/tools"))
    urls = [httpx.URL(deployment.base_url), httpx.URL(own_port)]
    connections = [socket.create_connection((url.host, url.port)) for url in urls]
    for connection in connections:
        connection.sendall(b"GET /tools/health HTTP/1.1\r\nhost: localhost\r\nx-slow: ")
        connection.settimeout(30)
    began = time.monotonic()

    answers = [connection.recv(4096) for connection in connections]

    assert [answer.split(b"\r\n")[0] for answer in answers] == [b"HTTP/1.1 408 Request Timeout"] * 2
    assert 9 < time.monotonic() - began < 20
    for connection in connections:
        connection.close()
