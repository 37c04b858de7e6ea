"""Runs with processes of their own: what they are asked for, and waiting for what they do."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

from tests.waiting import async_until
from trackway.run_config import compose
from trackway.trainer.data.row_files import write_rows
from trackway.trainer.run_state.folder import RunFolder, this_machine
from trackway.trainer.run_state.heartbeat import LivenessMonitor
from trackway.trainer.service_urls import ServiceUrls
from trackway.trainer.supervisor.manager import RunManager
from trackway.wire.agent import Sample
from trackway.wire.trainer import ENDED, RunInfo, RunRequest

STEPS = 4


class Pod:
    """What `Runs` on another machine would see, by a clock that is set by hand."""

    def __init__(self, outputs: Path, services: ServiceUrls) -> None:
        self.now = 0.0
        machine = this_machine().model_copy(update={"host": "another-pod"})
        self.runs = RunManager(outputs, services, 60.0, liveness=LivenessMonitor(machine, lambda: self.now))


def run_request(model: Path, folder: Path, sample: Callable[[int], Sample], name: str, *overrides: str) -> RunRequest:
    """A run of 4 steps that saves each one."""
    write_rows(folder / "train.parquet", [sample(index) for index in range(6)])
    write_rows(folder / "val.parquet", [sample(index) for index in range(2)])
    lines = [
        f"actor_rollout_ref.model.path={model}",
        f"data.train_files={folder}/train.parquet",
        f"data.val_files={folder}/val.parquet",
        "data.train_batch_size=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "actor_rollout_ref.rollout.n=4",
        f"trainer.total_training_steps={STEPS}",
        "trainer.save_freq=1",
        "trackway.group_attempts=2",
    ]
    return RunRequest(config=compose([*lines, *overrides]).model_dump(mode="json"), run=name)


def urls(agent_url: str, tmp_path: Path) -> ServiceUrls:
    """An agent, and nobody behind the tools' address."""
    return ServiceUrls(agent_url=agent_url, tools_url="http://127.0.0.1:9", weights_url=str(tmp_path / "weights"))


async def ended(runs: RunManager, name: str) -> RunInfo:
    """How a run stands at its end."""
    await async_until(lambda: runs.registry.info(name).state in ENDED)
    return runs.registry.info(name)


def held_at(agent, step: int, run: str | None = None) -> bool:
    """Whether the scripted agent was asked for a step, by any run or by one."""
    return any(request.step == step and run in (None, request.run) for request in agent.requests)


def pid_of(runs: RunManager, name: str) -> int:
    """The process that has a run."""
    owner = RunFolder(Path(runs.registry.info(name).folder)).owner()
    assert owner is not None
    return owner.pid


def standing_by() -> list[int]:
    """The processes that this one has started for runs to come."""
    found: list[int] = []
    for child in psutil.Process().children():
        with suppress(psutil.Error):  # it ends meanwhile
            if "--standby" in child.cmdline():
                found.append(child.pid)
    return found


def beat_of(folder: RunFolder) -> int:
    """How often its process has said that it lives."""
    owner = folder.owner()
    assert owner is not None
    return folder.beats(owner)


def on_disk(outputs: Path, name: str, **state: object) -> RunFolder:
    """A run of an earlier service, without a process."""
    folder = RunFolder(outputs / name)
    nowhere = ServiceUrls(agent_url="http://a", tools_url="http://t", weights_url="/w")
    info = folder.create(compose([]), nowhere)
    (folder.path / "state.json").write_text(RunInfo.model_validate({**info.model_dump(), **state}).model_dump_json())
    (folder.path / "worker.json").unlink()
    return folder
