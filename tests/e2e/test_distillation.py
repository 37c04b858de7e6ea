"""The promise: a policy or a service of its own teaches a run, also one that overlaps, and a slow teacher is named."""

import asyncio
import re
import threading
import time
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI, Request, Response

from tests.e2e.access_tokens import OPERATOR
from tests.e2e.test_policies import rollouts_of
from tests.serving import served_in_thread
from tests.waiting import WITHIN_S, until
from trackway.deploy.bundled import TINY_MODEL
from trackway.deploy.commands.why import reasons
from trackway.deploy.deployment.record import Deployment
from trackway.deploy.runs.found import find_run
from trackway.deploy.runs.session import RunSession
from trackway.trainer.run_state.folder import RunFolder
from trackway.trainer.run_state.trajectories import read_trajectories
from trackway.wire.trainer import RunState

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

LOSS = "distillation.distillation_loss"
ON = ("distillation.enabled=true", f"{LOSS}.use_task_rewards=false")
TEACHER = "distillation.teacher_models.teacher_model.model_path"


def test_a_teacher_that_is_the_student_leaves_it_as_it_is(deployment: Deployment, started) -> None:
    session = RunSession(deployment)
    runs = [
        session.follow(started(f"taught-by-{name}", 1, *ON, f"{TEACHER}={given}").run, lambda info: None)
        for name, given in (("base", "base"), ("a-model", TINY_MODEL))
    ]

    assert [info.state for info in runs] == [RunState.FINISHED] * 2
    for info in runs:
        folder = Path(info.folder)
        (row,) = [row.data for row in RunFolder(folder).rows() if "distillation/loss" in row.data]
        trajectories = read_trajectories(folder / "trajectories/step_1.parquet")
        assert abs(row["distillation/loss"]) < 1e-8 and row["actor/grad_norm"] < 1e-4
        for trajectory in trajectories:
            assert trajectory.teacher is not None
            own = [
                p for p, is_own in zip(trajectory.response_logprobs, trajectory.response_mask, strict=True) if is_own
            ]
            assert trajectory.teacher.logprobs == pytest.approx(own, abs=1e-4)
    assert rollouts_of(runs[0]) == rollouts_of(runs[1])


def test_an_overlapped_run_corrects_its_trajectories_and_takes_each_from_its_teacher(
    deployment: Deployment, started
) -> None:
    ahead = ("async_training.staleness_threshold=1", "algorithm.rollout_correction=decoupled_token_is")
    k1 = (f"{LOSS}.loss_mode=k1", f"{LOSS}.use_policy_gradient=true")
    info = started("taught-ahead", 4, *ON, *ahead, *k1, f"{TEACHER}=base")
    info = RunSession(deployment).follow(info.run, lambda info: None)

    assert info.state is RunState.FINISHED
    rows = [row.data for row in RunFolder(Path(info.folder)).rows() if "distillation/loss" in row.data]
    assert len(rows) == 4 and all("rollout_corr/rollout_is_mean" in row for row in rows)
    assert max(row["training/off_policy/trajectory_staleness/max"] for row in rows) == 1
    for step in range(1, 5):
        trained = read_trajectories(Path(info.folder) / f"trajectories/step_{step}.parquet")
        assert all(t.teacher and len(t.teacher.logprobs) == sum(t.response_mask) for t in trained)


def test_why_names_a_teacher_that_does_not_answer_and_the_run_goes_on_with_its_answer(
    deployment: Deployment, started, teacher_port: int
) -> None:
    answers = threading.Event()
    with served_in_thread(held_back(deployment.url("rollout"), answers), teacher_port):
        name = started("taught-slowly", 2, *ON, f"{TEACHER}=elsewhere", "trainer.test_freq=-1").run
        waits = r"rollout 1/\d+/\d waits for teacher 'teacher_model', \d+ s of \d+ s"
        until(lambda: re.search(waits, chain(deployment, name)), state=lambda: chain(deployment, name))
        answers.set()
        info = RunSession(deployment).follow(name, lambda info: None)

    assert (info.state, info.step) == (RunState.FINISHED, 2)


def chain(deployment: Deployment, name: str) -> str:
    """Return the output of `trackway why` for the run."""
    return "\n".join(reasons(find_run(deployment.outputs, name).info, time.time()))


def held_back(url: str, answers: threading.Event) -> FastAPI:
    """A proxy of the rollout service at the URL, which answers generations only after the event."""
    app = FastAPI()

    @app.api_route("/{path:path}", methods=["GET", "POST"])
    async def forward(path: str, request: Request) -> Response:
        assert not path.startswith("generate") or await asyncio.to_thread(answers.wait, WITHIN_S)
        headers = {"authorization": f"Bearer {OPERATOR}", "content-type": "application/json"}
        async with httpx.AsyncClient(timeout=WITHIN_S) as http:
            reply = await http.request(request.method, f"{url}/{path}", content=await request.body(), headers=headers)
        return Response(reply.content, reply.status_code, media_type=reply.headers["content-type"])

    return app
