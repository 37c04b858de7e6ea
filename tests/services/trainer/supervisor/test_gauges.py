"""What Prometheus learns of a run, by exact lines."""

from pathlib import Path

import pytest

from trackway.run_config import RunConfig
from trackway.trainer.app import create_app
from trackway.trainer.run_state.folder import RunFolder
from trackway.trainer.settings import TrainerSettings
from trackway.wire.trainer import BackendSummary, RunState

pytestmark = pytest.mark.anyio

STEP = {
    "critic/rewards/mean": 0.5,
    "critic/score/mean": 0.25,
    "response_length/mean": 20.0,
    "timing_s/step": 2.0,
    "perf/throughput": 100.0,
    "training/rollout_failure/failed_trajectories": 1.0,
    "val-core/openai/gsm8k/acc/mean@1": 0.75,
    "val-core/openai/gsm8k/reward/mean@1": 0.5,
    "actor/lr": 1e-6,
}


@pytest.fixture
def settings(tmp_path: Path) -> TrainerSettings:
    return TrainerSettings(outputs_dir=str(tmp_path / "outputs"), weights_url=str(tmp_path / "weights"))


def run_on_disk(settings: TrainerSettings, name: str) -> RunFolder:
    """One that is active as long as this process lives."""
    folder = RunFolder(Path(settings.outputs_dir) / name)
    folder.create(RunConfig(), settings.service_urls(), total_steps=9)
    return folder


async def shown(running, settings: TrainerSettings) -> list[str]:
    async with running(create_app(settings)) as client:
        lines = (await client.get("/metrics")).text.splitlines()
    return [line for line in lines if line.startswith("trackway_run_")]


async def test_the_active_run_and_its_newest_step_are_shown_in_a_few_numbers(running, settings: TrainerSettings):
    run_on_disk(settings, "active").update(step=3, restarts=1, metrics=STEP)
    ended = run_on_disk(settings, "ended")
    ended.move(RunState.FAILED)

    assert await shown(running, settings) == [
        'trackway_run_state{policy="",run="active",state="starting"} 1.0',
        'trackway_run_step{run="active"} 3.0',
        'trackway_run_total_steps{run="active"} 9.0',
        'trackway_run_restarts{run="active"} 1.0',
        'trackway_run_reward{run="active"} 0.5',
        'trackway_run_score{run="active"} 0.25',
        'trackway_run_response_tokens{run="active"} 20.0',
        'trackway_run_step_seconds{run="active"} 2.0',
        'trackway_run_tokens_per_second_per_gpu{run="active"} 100.0',
        'trackway_run_failed_trajectories{run="active"} 1.0',
        'trackway_run_accuracy{data_source="openai/gsm8k",run="active"} 0.75',
    ]


async def test_each_active_run_is_shown_in_one_sample_of_each_family(running, settings: TrainerSettings):
    run_on_disk(settings, "first").update(step=3, metrics={"critic/rewards/mean": 0.5})
    run_on_disk(settings, "second").update(step=1, metrics=STEP, policy="second")
    run_on_disk(settings, "ended").move(RunState.FAILED)

    lines = await shown(running, settings)

    names = ("state", "step", "reward", "score", "accuracy")
    chosen = sorted(line for line in lines if line.startswith(tuple(f"trackway_run_{name}{{" for name in names)))
    assert chosen == [
        'trackway_run_accuracy{data_source="openai/gsm8k",run="second"} 0.75',
        'trackway_run_reward{run="first"} 0.5',
        'trackway_run_reward{run="second"} 0.5',
        'trackway_run_score{run="second"} 0.25',
        'trackway_run_state{policy="",run="first",state="starting"} 1.0',
        'trackway_run_state{policy="second",run="second",state="starting"} 1.0',
        'trackway_run_step{run="first"} 3.0',
        'trackway_run_step{run="second"} 1.0',
    ]


async def test_of_ended_runs_the_last_one_is_shown_and_of_none_nothing(running, settings: TrainerSettings):
    before = await shown(running, settings)
    first, second = run_on_disk(settings, "first"), run_on_disk(settings, "second")
    second.move(RunState.FAILED)
    first.move(RunState.FAILED)

    assert (before, (await shown(running, settings))[0]) == (
        [],
        'trackway_run_state{policy="",run="first",state="failed"} 1.0',
    )


async def test_what_backends_do_not_have_of_the_run_is_shown(running, settings: TrainerSettings):
    lost = BackendSummary(backend="wandb", metrics_lost=5, feedback_lost=2)
    run_on_disk(settings, "r").update(tracking=[BackendSummary(backend="weave", feedback_waiting=7), lost])

    assert [line for line in await shown(running, settings) if "backend" in line] == [
        'trackway_run_rows_waiting{backend="weave",run="r"} 0.0',
        'trackway_run_rows_waiting{backend="wandb",run="r"} 0.0',
        'trackway_run_feedback_waiting{backend="weave",run="r"} 7.0',
        'trackway_run_feedback_waiting{backend="wandb",run="r"} 0.0',
        'trackway_run_tracking_lost{backend="weave",run="r"} 0.0',
        'trackway_run_tracking_lost{backend="wandb",run="r"} 7.0',
    ]
