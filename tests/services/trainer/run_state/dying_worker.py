"""A run's process, several times over, each of which kills itself at a moment given by name; the last one goes on.

`python dying_worker.py FOLDER [MOMENT ...]`. Each life is a fork of this process, so that torch is imported once.
"""

import itertools
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from torch.utils.tensorboard import SummaryWriter
from transformers import Qwen3ForCausalLM

from trackway.clients.weights import WeightStore
from trackway.learner import optimizer
from trackway.trainer import worker
from trackway.trainer.loop import build, fit, training
from trackway.trainer.loop.rollout_client import Rollouts
from trackway.trainer.loop.scheduler import GroupScheduler
from trackway.trainer.loop.weight_publisher import Publisher
from trackway.trainer.run_state import checkpoint
from trackway.trainer.run_state.folder import RunFolder
from trackway.wire.trainer import ENDED, MetricsRow, RunState

assert fit.fit and build.build and SummaryWriter and Qwen3ForCausalLM  # imported before the first fork


class Moment(NamedTuple):
    """Around the nth call of a function."""

    owner: type | ModuleType
    name: str
    nth: int = 1
    after: bool = False


MOMENTS = {
    "in the first validation": Moment(Rollouts, "collect"),
    "in a rollout": Moment(GroupScheduler, "take"),
    "before groups are resumed": Moment(GroupScheduler, "_resume"),
    "after groups are submitted": Moment(GroupScheduler, "submit", 2, after=True),
    "with all rollouts there": Moment(training, "write_trajectories", 2, after=True),
    "in an update": Moment(optimizer, "step", 2, after=True),
    "after groups are used": Moment(GroupScheduler, "used", 2, after=True),
    "after a snapshot of the groups": Moment(GroupScheduler, "snapshot", after=True),
    "before a publication": Moment(Publisher, "publish", 2),
    "in a publication": Moment(WeightStore, "prune", 3),
    "in a validation": Moment(Rollouts, "collect"),
    "in a checkpoint": Moment(checkpoint, "_sync"),
    "before the checkpoint is the latest": Moment(checkpoint, "_write_latest"),
    "between checkpoint and row": Moment(RunFolder, "append_row", 2),
    "in a row": Moment(RunFolder, "append_row", 2),
    "after a row": Moment(RunFolder, "append_row", after=True),
    "while an old checkpoint is removed": Moment(checkpoint, "_prune", after=True),
    "after a row, its checkpoint damaged": Moment(RunFolder, "append_row", after=True),
}


def main(folder: RunFolder, moments: list[str]) -> int:
    """Live through the moments, then to the end; 0 when each life ended as it had to."""
    for moment in moments:
        status = life(folder, moment)
        if not os.WIFSIGNALED(status) or os.WTERMSIG(status) != signal.SIGKILL:
            return fail(f"{moment}: it was never reached; the process ended with {status}")
        if folder.info().state not in ENDED:
            folder.move(RunState.RESTARTING)
    return os.waitstatus_to_exitcode(life(folder, None))


def life(folder: RunFolder, moment: str | None) -> int:
    """One process of the run; how it ended, as `os.waitpid` says it."""
    process = os.fork()
    if process == 0:
        if moment is not None:
            arm(moment)
        os._exit(worker.main([str(folder.path), "--skip-damaged"]))
    return os.waitpid(process, 0)[1]


def arm(name: str) -> None:
    """From now on this process dies at the moment."""
    moment = MOMENTS[name]
    original: Callable[..., object] = getattr(moment.owner, moment.name)
    calls = itertools.count(1)

    def dying(*given: object, **named: object) -> object:
        last = next(calls) == moment.nth
        if last and name == "in a row":
            write_half(*given)
        if last and not moment.after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(*given, **named)
        if last:
            if name == "after a row, its checkpoint damaged":
                damage_newest(*given)
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(moment.owner, moment.name, dying)


def write_half(*given: object) -> None:
    """Half of the line that `append_row` would write."""
    folder, row = given
    assert isinstance(folder, RunFolder) and isinstance(row, MetricsRow)
    line = row.model_dump_json()
    with folder.metrics_file.open("a") as file:
        file.write(line[: len(line) // 2])


def damage_newest(*given: object) -> None:
    """1 kB of ones in the middle of the newest checkpoint's weights: NaN in every format."""
    folder = given[0]
    assert isinstance(folder, RunFolder)
    newest = checkpoint.find_latest(folder.checkpoints)
    assert newest is not None
    weights = newest / "actor" / "model.safetensors"
    with weights.open("r+b") as file:
        file.seek(weights.stat().st_size // 2)
        file.write(b"\xff" * 1024)


def fail(message: str) -> int:
    """Say why; 1."""
    print(message, file=sys.stderr)
    return 1


if __name__ == "__main__":
    raise SystemExit(main(RunFolder(Path(sys.argv[1])), sys.argv[2:]))
