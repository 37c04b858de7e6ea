"""Feedback on a trajectory's call, as the trainer records it, and the reader's program of docs/guides/weave.md."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from trackway.tracing import Tracing, TracingSettings, set_outcome, trajectory_span, turn_span
from trackway.tracing.active import activated
from trackway.trainer.delivery.assessment import Assessment
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
        {one["feedback_type"]: one["payload"]["value"] for one in call.summary["weave"]["feedback"]}  # pyright: ignore[reportOptionalSubscript]
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
