"""Feedback on a trajectory's call, as the trainer records it, and the reader's program of docs/guides/weave.md."""

import contextlib
import os
import re
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import httpx
import pytest

from trackway.tracing import Tracing, TracingSettings, set_outcome, trajectory_span, turn_span
from trackway.tracing.span_handle import activated
from trackway.trainer.delivery.feedback_queue import Assessment
from trackway.trainer.delivery.jobs import Later
from trackway.trainer.delivery.weave_feedback import WeaveFeedback
from trackway.wire.trajectory import Tags

if TYPE_CHECKING:
    from weave.trace.weave_client import WeaveClient

pytestmark = [pytest.mark.weave, pytest.mark.slow]

DOCS = Path(__file__).parents[2] / "docs" / "guides" / "weave.md"


@pytest.fixture(scope="module")
def roots(weave_server: TracingSettings, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The call ids of two trajectories of step 3, both with their feedback."""
    tracing = Tracing("agent", weave_server)
    ids = [trajectory(tracing, rollout_n) for rollout_n in (0, 1)]
    assert tracing.shutdown(30)
    assert weave_server.weave_project and weave_server.weave_api_key
    project, key = weave_server.weave_project, weave_server.weave_api_key
    weave = WeaveFeedback(tmp_path_factory.mktemp("run") / "tracking", weave_server.weave_url, project, key)
    weave.queue.push(
        [
            Assessment("", ids[0], {"reward": 1.0, "advantage": 0.5, "fate": "used"}),
            Assessment("", ids[1], {"reward": 0.0, "advantage": -0.5, "fate": "dropped_stale"}),
        ]
    )
    assert weave.advance() and not weave.advance()
    weave.close()
    assert weave.summary().lost == 0
    return ids


def trajectory(tracing: Tracing, rollout_n: int) -> str:
    tags = Tags(experiment_name="gsm8k_grpo", step=3, sample_index=17, rollout_n=rollout_n)
    identity = f"gsm8k_grpo/3/17/{rollout_n}"
    with activated(tracing), trajectory_span(tags, identity, "tool_agent", [], True) as root:
        with turn_span(0):
            pass
        set_outcome(root)
    assert root.span_id is not None
    return root.span_id


def test_feedback_is_read_with_its_call(roots: list[str], weave_client: "WeaveClient") -> None:
    calls = weave_client.get_calls(filter={"call_ids": roots}, include_feedback=True)
    kept = [
        {entry["feedback_type"]: entry["payload"]["value"] for entry in call.summary["weave"]["feedback"]}  # pyright: ignore[reportOptionalSubscript]
        for call in calls
    ]
    assert kept == [
        {"reward": 1.0, "advantage": 0.5, "fate": "used"},
        {"reward": 0.0, "advantage": -0.5, "fate": "dropped_stale"},
    ]


def test_the_program_of_the_documentation_reads_them(roots: list[str], weave_server: TracingSettings) -> None:
    [program] = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    assert weave_server.weave_project and weave_server.weave_api_key
    program = program.replace("my-team/gsm8k", weave_server.weave_project)
    place = {"WF_TRACE_SERVER_URL": weave_server.weave_url, "WANDB_BASE_URL": weave_server.weave_url}
    key = {"WANDB_API_KEY": weave_server.weave_api_key.get_secret_value()}
    read = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **place, **key}, capture_output=True, text=True, timeout=120
    )
    assert read.returncode == 0, read.stderr
    assert read.stdout.splitlines() == [
        "s3/i17/n0 ok {'reward': 1.0, 'advantage': 0.5, 'fate': 'used'}",
        "   agent trajectory",
        "   chain turn 0",
        "s3/i17/n1 ok {'reward': 0.0, 'advantage': -0.5, 'fate': 'dropped_stale'}",
        "   agent trajectory",
        "   chain turn 0",
        "['s3/i17/n0', 's3/i17/n1']",
    ]


class Relay:
    """Passes connections on to a server, and ends a connection instead of passing on its answer, `drops` times."""

    def __init__(self, url: str, drops: int) -> None:
        self._server = (urlsplit(url).hostname, urlsplit(url).port)
        self._drops = drops

    def accept(self, listener: socket.socket) -> None:
        """Serve one connection after another until the listener is shut down."""
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                with client, socket.create_connection(self._server) as server:
                    self._pass(client, server)

    def _pass(self, client: socket.socket, server: socket.socket) -> None:
        while True:
            for sender in select.select([client, server], [], [], 60)[0]:
                data = sender.recv(65536)
                if not data:
                    return
                if sender is server and self._drops:
                    self._drops -= 1
                    return
                (client if sender is server else server).sendall(data)


@contextlib.contextmanager
def lost_answers(url: str, drops: int) -> Iterator[str]:
    """The URL of a relay to `url` that drops the first `drops` answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        relay = threading.Thread(target=Relay(url, drops).accept, args=[listener], daemon=True)
        relay.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        relay.join(60)


@pytest.mark.parametrize("drops", [1, 2, 3])
def test_feedback_whose_answers_are_lost_is_stored_once(
    weave_server: TracingSettings, tmp_path: Path, drops: int
) -> None:
    tracing = Tracing("agent", weave_server)
    root = trajectory(tracing, 10 + drops)
    assert tracing.shutdown(30)
    assert weave_server.weave_project and weave_server.weave_api_key
    project, key = weave_server.weave_project, weave_server.weave_api_key
    tries = 0

    with (
        lost_answers(weave_server.weave_url, drops) as url,
        contextlib.closing(WeaveFeedback(tmp_path / "tracking", url, project, key)) as weave,
    ):
        weave.queue.push([Assessment("", root, {"reward": 1.0, "advantage": 0.5, "fate": "used"})])
        while weave.summary().waiting:
            tries += 1
            try:
                weave.advance()
            except Later as lost:
                assert "gave no valid answer" in str(lost)

    of_call = {"$expr": {"$eq": [{"$getField": "weave_ref"}, {"$literal": f"weave:///{project}/call/{root}"}]}}
    stored = httpx.post(
        f"{weave_server.weave_url}/feedback/query",
        json={"project_id": project, "fields": ["feedback_type"], "query": of_call},
        auth=("api", key.get_secret_value()),
        timeout=30,
    ).raise_for_status()
    assert sorted(row["feedback_type"] for row in stored.json()["result"]) == ["advantage", "fate", "reward"]
    assert (tries, weave.summary().lost) == (1 + drops, 0)
