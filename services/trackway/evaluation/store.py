"""An evaluation on disk: while it runs its own files, and at the end a run's folder that only validated.

evaluation.json    what is evaluated, and at the end the summary
tasks.jsonl        at the end the numbers of each row
config.json        the resolved configuration
tools.json         the tools that the rollouts are offered
rollouts.jsonl     trajectories that have ended, one per line, until all have
trajectories/      val_step_0.parquet, as every run has; with state.json and metrics.jsonl
"""

import json
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

from pydantic import ValidationError

from trackway.evaluation.summary import Evaluation, Paired, by_data_source, paired, summary, task_rows
from trackway.run_config import RunConfig
from trackway.system import append_line, atomic_write, writing
from trackway.trainer.delivery.jobs import Later
from trackway.trainer.delivery.mlflow_run import MlflowRun
from trackway.trainer.metrics import estimate_metrics, tasks_of, validation_metrics
from trackway.trainer.run_state.folder import EVALUATION_FILE, RunFolder, outputs_folders
from trackway.trainer.run_state.trajectories import read_trajectories, write_trajectories
from trackway.trainer.service_urls import ServiceUrls
from trackway.trainer.traces.run import links_of, validation_feedback
from trackway.wire.chat import ToolSchema
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.trainer import MetricsRow, RunState
from trackway.wire.trajectory import Trajectory


class EvaluationStore:
    """The files of one evaluation."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._folder = RunFolder(path)
        self.tasks = path / "tasks.jsonl"
        self._lines = path / "rollouts.jsonl"
        self._table = path / "trajectories" / "val_step_0.parquet"

    @classmethod
    def find(cls, outputs: Path, name: str) -> Self:
        """The evaluation of that name in the outputs folder, or in one directly in it. It need not exist."""
        stores = [cls(folder.resolve() / name) for folder in outputs_folders(outputs)]
        return next((store for store in stores if store.exists), stores[0])

    @property
    def exists(self) -> bool:
        """Return whether an evaluation has this name."""
        return (self.path / EVALUATION_FILE).is_file()

    @property
    def finished(self) -> bool:
        """Return whether all rollouts have ended."""
        return self.exists and self.evaluation().summary is not None

    def begin(self, evaluation: Evaluation, config: RunConfig, tools: Sequence[ToolSchema] = ()) -> None:
        """Write the evaluation's settings. Raises TrackwayError(CONFLICT) when a run or an evaluation has the name."""
        if self.exists or self._folder.exists:
            name = self.path.name
            message = f"{name!r} exists in {self.path.parent}; give another --run, or continue it with --resume {name}"
            raise TrackwayError(ErrorCode.CONFLICT, message)
        with writing(self.path, "the evaluation"):
            self.path.mkdir(parents=True, exist_ok=True)
        self._folder.write_config(config)
        self._folder.write_tools(tools)
        self._write(evaluation)

    def evaluation(self) -> Evaluation:
        """Read the evaluation. Raises TrackwayError(NOT_FOUND) if it is missing or unreadable."""
        try:
            return Evaluation.model_validate_json((self.path / EVALUATION_FILE).read_bytes())
        except (OSError, ValidationError) as error:
            message = f"expected an evaluation at {self.path}, got no readable file of one ({type(error).__name__})"
            raise TrackwayError(ErrorCode.NOT_FOUND, message) from error

    def config(self) -> RunConfig:
        """The resolved configuration."""
        return self._folder.config()

    def add(self, group: Iterable[Trajectory]) -> None:
        """Keep the rollouts of a row. Raises StorageError."""
        for trajectory in group:
            append_line(self._lines, trajectory.model_dump_json(), what="a rollout")

    def compared(self, other: "EvaluationStore") -> Paired | None:
        """This evaluation against another, row by row. None without a row in common."""
        return paired(self.trajectories(), other.trajectories(), self.evaluation().pass_above)

    def trajectories(self) -> list[Trajectory]:
        """The rollouts that have ended, by row and number. Of one that was repeated, the newest."""
        if not self._lines.is_file():
            return read_trajectories(self._table) if self._table.is_file() else []
        found: dict[str, Trajectory] = {}
        for line in self._lines.read_bytes().splitlines():
            with suppress(ValidationError):  # the last line of a killed process
                trajectory = Trajectory.model_validate_json(line)
                found[trajectory.id] = trajectory
        return sorted(found.values(), key=_place)

    def done(self) -> set[int | str]:
        """Rows whose rollouts have all ended without an infrastructure error."""
        n = self.evaluation().n
        return {index for index, task in tasks_of(self.trajectories()).items() if task.n == n}

    def finish(self) -> Evaluation:
        """Write the files of a run that ended, then the summary. Raises StorageError."""
        trajectories = self.trajectories()
        evaluation = _summed_up(self.evaluation(), trajectories)
        write_trajectories(self._table, trajectories)
        rows = (f"{json.dumps(row, ensure_ascii=False)}\n" for row in task_rows(trajectories, evaluation.pass_above))
        atomic_write(self.tasks, "".join(rows), what="the numbers of each row")
        for file in ("state.json", "metrics.jsonl"):  # of an end that was cut off
            (self.path / file).unlink(missing_ok=True)
        self._folder.create(self.config(), ServiceUrls(agent_url="", tools_url="", weights_url=""))
        self._folder.move(RunState.RUNNING)
        if evaluation.summary is not None and evaluation.summary.rollouts:
            metrics = validation_metrics(trajectories, evaluation.n)
            metrics |= estimate_metrics("evaluation", evaluation.summary.estimates)
            self._folder.append_row(MetricsRow(step=0, data=metrics))
            self._folder.update(metrics=metrics)
        self._folder.move(RunState.FINISHED, message=f"evaluation of {evaluation.model}")
        self._folder.disown()
        self._write(evaluation)
        self._lines.unlink(missing_ok=True)
        return evaluation

    def send(self, uri: str, deadline_s: float) -> None:
        """Send a finished evaluation to MLflow as a run, linked to its traces, whose rewards become feedback.

        Raises TrackwayError(UNAVAILABLE) after the deadline.
        """
        config, trajectories = self.config(), self.trajectories()
        tracking, end = MlflowRun(self._folder, config, uri), time.monotonic() + deadline_s
        feedback = validation_feedback(trajectories) if config.trackway.feedback else []
        tracking.queue.push([*links_of(trajectories), *feedback])
        tracking.end("FINISHED")
        try:
            while (problem := _advanced(tracking)) is not None:
                if time.monotonic() > end:
                    message = f"expected MLflow at {uri} to take the evaluation in {deadline_s:g} s, got: {problem}"
                    raise TrackwayError(ErrorCode.UNAVAILABLE, message)
            self._folder.update(**tracking.ids)
        finally:
            tracking.close()

    def _write(self, evaluation: Evaluation) -> None:
        atomic_write(self.path / EVALUATION_FILE, evaluation.model_dump_json(indent=2), what="the evaluation")


def _advanced(tracking: MlflowRun) -> str | None:
    """Send the next part. None when everything is sent, else why it is not."""
    try:
        return "more to send" if tracking.advance() else None
    except Later as error:
        time.sleep(0.5)
        return str(error)


def _place(trajectory: Trajectory) -> tuple[bool, int | str, int]:
    index = trajectory.tags.sample_index
    return isinstance(index, str), index, trajectory.tags.rollout_n


def _summed_up(evaluation: Evaluation, trajectories: Sequence[Trajectory]) -> Evaluation:
    above = evaluation.pass_above
    sums = {"summary": summary(trajectories, above), "data_sources": by_data_source(trajectories, above)}
    return evaluation.model_copy(update=sums)
