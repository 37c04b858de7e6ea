"""Our settings, and Weave's own client, for Weave's own trace server."""

import os

os.environ["WANDB_ERROR_REPORTING"] = "false"  # before weave is imported: its errors here are nobody else's business

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from pydantic import SecretStr

from tests.weave.weave_process import API_KEY
from tests.weave.weave_process import weave_url as weave_url
from trackway.tracing import TracingSettings
from trackway.wire.trajectory import TraceBackend

if TYPE_CHECKING:
    from weave.trace.weave_client import WeaveClient


@pytest.fixture(scope="module")
def weave_server(weave_url: str, request: pytest.FixtureRequest) -> TracingSettings:
    """Settings that export to the trace server, each test module into a project of its own."""
    return TracingSettings(
        backends=[TraceBackend.WEAVE],
        weave_url=weave_url,
        weave_api_key=SecretStr(API_KEY),
        weave_project=f"my-team/{request.path.stem}",
    )


@pytest.fixture(scope="module")
def weave_client(weave_server: TracingSettings) -> Iterator["WeaveClient"]:
    """What `weave.init` returns, without what it does to the process: OpenTelemetry's global provider, import hooks."""
    from weave.trace.weave_client import WeaveClient
    from weave.trace_server_bindings.remote_http_trace_server import RemoteHTTPTraceServer

    server = RemoteHTTPTraceServer(weave_server.weave_url, password=API_KEY)
    entity, project = (weave_server.weave_project or "").split("/")
    client = WeaveClient(entity, project, server, ensure_project_exists=False)
    yield client
    client.finish()
    server._stainless_client.close()  # weave has no way to close its connections
