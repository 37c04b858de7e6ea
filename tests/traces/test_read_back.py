"""`examples/tracing/read_back.py` finds a run's text, tokens, tool calls and score in each backend.

The extended tests need `pip install arize-phoenix` and `pip install 'agentmesh-ai[otlp]'`, with `phoenix` and
`agentmesh` in the PATH.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from pydantic import SecretStr

from tests.waiting import until
from tests.weave.weave_process import API_KEY
from tests.weave.weave_process import weave_url as weave_url
from trackway.system import free_port
from trackway.tracing import (
    Tracing,
    TracingSettings,
    chat_span,
    set_outcome,
    tool_span,
    trajectory_span,
    turn_span,
)
from trackway.tracing.span_handle import activated
from trackway.trainer.run_state.trajectories import write_trajectories
from trackway.wire.chat import FunctionCall, Message, ToolCall
from trackway.wire.rollout import SamplingParams
from trackway.wire.trajectory import Reward, StopReason, Tags, TraceBackend, Trajectory, Turn

pytestmark = pytest.mark.slow

PROMPT = [Message(role="system", content="Be brief."), Message(role="user", content="6*9?")]
CALL = ToolCall(id="c1", function=FunctionCall(name="calculator", arguments='{"expression": "6*9"}'))
SAID = [
    [
        Message(role="assistant", content="<think>I need a tool.</think>", tool_calls=[CALL]),
        Message(role="tool", content="54", tool_call_id="c1"),
    ],
    [Message(role="assistant", content="#### 54")],
]
TOKENS = [30, 12]


def traced(settings: TracingSettings, rollout_n: int, score: float) -> Trajectory:
    """A trajectory of two turns, whose trace the backends have."""
    tracing = Tracing("agent", settings)
    tags = Tags(experiment_name="read-back", step=1, sample_index=7, rollout_n=rollout_n)
    name = f"read-back/1/7/{rollout_n}"
    with activated(tracing), trajectory_span(tags, name, "tool_agent", PROMPT, True) as root:
        for index, tokens in enumerate(TOKENS):
            with turn_span(index):
                with chat_span("tiny", SamplingParams()) as chat:
                    chat.usage(40, tokens)
                if index == 0:
                    with tool_span("calculator", {"expression": "6*9"}, "c1") as tool:
                        tool.outputs({"text": "54", "reward": 0.0})
        root.outputs({"reward": score, "messages": [message for messages in SAID for message in messages]})
        set_outcome(root)
    assert tracing.flush(60) and tracing.stats().lost == 0
    tracing.shutdown()
    executed = (1, 0)
    turns = [
        Turn(
            index=index,
            messages=messages,
            response_start=0,
            response_end=0,
            finish_reason="stop",
            calls_executed=executed[index],
        )
        for index, messages in enumerate(SAID)
    ]
    return Trajectory(
        id=name,
        session_id=name,
        tags=tags,
        agent_name="tool_agent",
        data_source="tiny",
        prompt_messages=PROMPT,
        response_ids=[1] * sum(TOKENS),
        response_mask=[1] * sum(TOKENS),
        response_logprobs=[0.0] * sum(TOKENS),
        turns=turns,
        reward=Reward(score=score),
        num_turns=4,
        stop_reason=StopReason.ANSWERED,
        trace_id=root.trace_id,
        span_id=root.span_id,
    )


def read_back(run: Path, *words: str, variables: Mapping[str, str] | None = None) -> tuple[int, str]:
    """The exit status of the command, and its last line."""
    command = [sys.executable, "examples/tracing/read_back.py", words[0], str(run), *words[1:]]
    done = subprocess.run(
        command, env={**os.environ, **(variables or {})}, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout, done.stderr
    return done.returncode, done.stdout.splitlines()[-1]


def compared(
    settings: TracingSettings, run: Path, *words: str, variables: Mapping[str, str] | None = None
) -> list[tuple[int, str]]:
    """Run the command on a run's files, then on the files with a score that differs from the trace's."""
    one, other = traced(settings, 0, 1.0), traced(settings, 1, 0.0)
    found = []
    for score in (0.0, 0.5):
        changed = other.model_copy(update={"reward": Reward(score=score)})
        write_trajectories(run / "trajectories" / "step_1.parquet", [one, changed])
        found.append(read_back(run, *words, variables=variables))
    return found


EXPECTED = [
    (0, "2 of 2 traced trajectories are the same"),
    (1, "1 of 2 traced trajectories are the same"),
]


def test_mlflow_has_the_run(mlflow_server: str, tmp_path: Path) -> None:
    settings = TracingSettings(mlflow_uri=mlflow_server, otlp_endpoint=None)
    assert compared(settings, tmp_path, "mlflow", mlflow_server) == EXPECTED


@pytest.mark.weave
def test_weave_has_the_run(weave_url: str, tmp_path: Path) -> None:
    settings = TracingSettings(
        backends=[TraceBackend.WEAVE],
        weave_url=weave_url,
        weave_api_key=SecretStr(API_KEY),
        weave_project="my-team/read-back",
    )
    variables = {"WF_TRACE_SERVER_URL": weave_url, "WANDB_BASE_URL": weave_url, "WANDB_API_KEY": API_KEY}
    assert compared(settings, tmp_path, "weave", "my-team/read-back", variables=variables) == EXPECTED


@contextmanager
def receiver(words: Sequence[str], port: int, folder: Path, variables: Mapping[str, str]) -> Iterator[TracingSettings]:
    """Settings that send to an OTLP receiver, which runs until the block ends."""
    url = f"http://127.0.0.1:{port}"
    program = shutil.which(words[0])
    if program is None:
        pytest.skip(f"{words[0]} is not in the PATH")
    with (folder / "log").open("wb") as log:
        environment = {**os.environ, "HOME": str(folder), **variables}
        server = subprocess.Popen([program, *words[1:]], cwd=folder, env=environment, stdout=log, stderr=log)
    try:
        until(lambda: server.poll() is not None or _answers(url), 240.0)
        yield TracingSettings(backends=[TraceBackend.OTLP], otlp_endpoint=f"{url}/v1/traces")
    finally:
        server.terminate()
        server.wait(60)


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5.0).status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.extended
def test_phoenix_has_the_run(tmp_path: Path) -> None:
    port = free_port()
    variables = {"PHOENIX_PORT": str(port), "PHOENIX_GRPC_PORT": str(free_port()), "PHOENIX_WORKING_DIR": str(tmp_path)}
    with receiver(["phoenix", "serve"], port, tmp_path, variables) as settings:
        assert compared(settings, tmp_path, "phoenix", f"http://127.0.0.1:{port}") == EXPECTED


@pytest.mark.extended
def test_agentmesh_has_the_run(tmp_path: Path) -> None:
    port = free_port()
    with receiver(["agentmesh", "dashboard", "--port", str(port)], port, tmp_path, {}) as settings:
        assert compared(settings, tmp_path, "agentmesh", f"http://127.0.0.1:{port}") == EXPECTED
