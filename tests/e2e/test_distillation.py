"""The promise: a policy of the rollout service teaches a run through the services, and its trace shows it."""

from pathlib import Path

import pytest

from tests.e2e.test_policies import rollouts_of
from trackway.deploy.bundled import TINY_MODEL
from trackway.deploy.deployment.record import Deployment
from trackway.deploy.runs.session import RunSession
from trackway.trainer.run_state.folder import RunFolder
from trackway.trainer.run_state.trajectories import read_trajectories
from trackway.wire.trainer import RunState

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

ON = ("distillation.enabled=true", "distillation.distillation_loss.use_task_rewards=false")
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
