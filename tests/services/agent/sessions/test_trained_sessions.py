"""Sessions of a deployed agent: what their run fixes, and how they reach it when they end."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from tests.services.agent.agent_services import AgentServices, open_services
from tests.services.agent.sessions.test_session import ANSWER, QUESTION, SAMPLE, chat, ended, opened
from trackway.agent.settings import AgentSettings
from trackway.clients import CallPolicy
from trackway.run_config import RunConfig
from trackway.trainer.app import create_app
from trackway.trainer.run_state.folder import RunFolder
from trackway.trainer.run_state.session_inbox import OpenInbox, SessionInbox
from trackway.trainer.settings import TrainerSettings
from trackway.wire.agent import Limits
from trackway.wire.errors import ErrorCode
from trackway.wire.rollout import SamplingParams
from trackway.wire.sessions import SessionRun
from trackway.wire.trainer import RunState
from trackway.wire.trajectory import TraceTarget

pytestmark = pytest.mark.anyio

FIXED = SessionRun(
    run="run-a",
    experiment_name="exp",
    sampling_params=SamplingParams(temperature=0.5, max_tokens=300),
    limits=Limits(max_prompt_length=2048, max_response_length=4096),
    trace_target=TraceTarget(),
)


QUICK = CallPolicy(attempts=2, backoff_s=0.01, max_backoff_s=0.01, total_s=1.5)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A run in progress."""
    folder = RunFolder(tmp_path / "outputs" / "run-a")
    folder.create(RunConfig(), TrainerSettings().service_urls())
    folder.update(step=4)
    return folder


@pytest.fixture
async def services(
    anyio_backend: str, settings: AgentSettings, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> AsyncIterator[AgentServices]:
    trainer = create_app(TrainerSettings(outputs_dir=str(tmp_path / "outputs")))
    own = settings.model_copy(update={"trainer_url": "http://trainer", "trainer_policy": QUICK})
    async with open_services(own, tokenizer, trainer=trainer) as services:
        yield services


def inbox_of(run: RunFolder, most: int = 8, policy: str | None = None) -> SessionInbox:
    inbox = SessionInbox(run.path)
    fixed = FIXED.model_copy(update={"run": run.name, "policy": policy})
    inbox.open(OpenInbox(run=fixed, most=most), trained=())
    return inbox


async def test_a_session_has_what_its_run_fixes_and_goes_to_it_once_it_has_ended(
    services: AgentServices, run: RunFolder
) -> None:
    inbox = inbox_of(run)
    access = await opened(services, ANSWER, train={})
    await chat(services, access, QUESTION, temperature=0.0)
    assert inbox.waiting() == []

    trajectory = await ended(services, access)
    again = await ended(services, access)

    [waiting] = inbox.waiting()
    [session] = inbox.draw([waiting.session_id])
    assert (session.session_id, session.group, session.trajectory) == (access.session_id, 7, trajectory) and (
        again == trajectory
    )
    assert (trajectory.id, trajectory.tags.experiment_name) == ("run-a/5/7/0", "exp")
    assert trajectory.reward is not None and trajectory.reward.score == 1.0
    [params] = [request.sampling_params for _, request in services.model.requests]
    assert (params.temperature, params.max_tokens) == (0.5, 300)


async def test_a_session_that_is_not_taken_says_so_at_its_end_and_is_taken_later(
    services: AgentServices, run: RunFolder
) -> None:
    inbox = inbox_of(run, most=1)
    first, second = [
        await opened(services, ANSWER, ANSWER, train=train) for train in ({"group": "a"}, {"run": "run-a"})
    ]
    for access in (first, second):
        await chat(services, access, QUESTION)
    await ended(services, first)

    full = await services.client.post(f"/sessions/{second.session_id}/end")
    assert (full.status_code, full.json()["error"]["code"]) == (429, "overloaded")
    assert "raise trackway.max_waiting_sessions" in full.json()["error"]["message"]
    inbox.draw([first.session_id])
    await ended(services, second)

    assert [(session.session_id, session.group) for session in inbox.waiting()] == [(second.session_id, 7)]


async def test_a_session_that_failed_is_not_trained(services: AgentServices, run: RunFolder) -> None:
    inbox = inbox_of(run)
    unscored, uncalled = [await opened(services, ANSWER, train={}) for _ in range(2)]
    await chat(services, unscored, QUESTION)
    services.reward.app = None

    trajectories = [await ended(services, access) for access in (unscored, uncalled)]

    codes = [trajectory.error and trajectory.error.code for trajectory in trajectories]
    assert codes == [ErrorCode.UNAVAILABLE, ErrorCode.AGENT_FAILED] and inbox.waiting() == []


async def test_a_session_asks_the_policy_of_its_run_and_a_run_must_be_named_where_several_take_sessions(
    services: AgentServices, run: RunFolder
) -> None:
    other = RunFolder(run.path.parent / "run-b")
    other.create(RunConfig(), TrainerSettings().service_urls())
    inbox = inbox_of(run, policy="tiny")
    unnamed = await opened(services, ANSWER, ANSWER, train={}, policy="another")  # run-b takes none yet
    await chat(services, unnamed, QUESTION)
    await ended(services, unnamed)
    inbox_of(other)
    named = await opened(services, ANSWER, ANSWER, train={"run": "run-b"})
    await chat(services, named, QUESTION)
    await ended(services, named)

    assert [request.model for _, request in services.model.requests] == ["tiny", None]
    assert [len(box.waiting()) for box in (inbox, SessionInbox(other.path))] == [1, 1]
    message = "expected the name of a run in train.run, since run-a and run-b train on sessions, got none; name one"
    assert await refused(services, train={}) == (409, message)


async def refused(services: AgentServices, **body: Any) -> tuple[int, str]:
    answer = await services.client.post("/sessions", json={"sample": SAMPLE, **body})
    return answer.status_code, answer.json()["error"]["message"]


async def test_a_session_that_no_run_would_train_is_refused_when_it_is_opened(
    services: AgentServices, run: RunFolder
) -> None:
    none = "expected a run that trains on sessions, got run 'run-a', which takes none"
    over = "expected a run in progress that trains on sessions, got run 'run-a', which is stopped"
    inbox_of(run)
    ungrouped = {**SAMPLE, "extra_info": {}}

    assert (await refused(services, sample=ungrouped, train={}))[1].startswith("expected train.group or sample.extra")
    (run.path / "sessions" / "run.json").unlink()
    assert [(status, text[: len(none)]) for status, text in [await refused(services, train={})]] == [(409, none)]
    for state in (RunState.STOPPING, RunState.STOPPED):
        run.move(state)
    assert [(status, text[: len(over)]) for status, text in [await refused(services, train={})]] == [(409, over)]
