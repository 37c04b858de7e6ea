"""The results of `trackway.train` and `trackway.evaluate`."""

from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, get_args, overload

from rich.console import Console

from trackway.deploy.deployment.attach import folder_here
from trackway.deploy.runs import shown
from trackway.deploy.runs.evaluation_report import evaluation_report
from trackway.deploy.runs.session import RunSession
from trackway.deploy.terminal.progress import run_bar
from trackway.evaluation.store import EvaluationStore
from trackway.evaluation.summary import Evaluation, Paired, RolloutSummary
from trackway.system.process import UserError
from trackway.trainer.run_state.export import Export, export_checkpoint
from trackway.trainer.run_state.folder import RunFolder
from trackway.trainer.run_state.trajectories import read_trajectories, to_record
from trackway.trainer.run_state.trajectory_export import (
    ExportedTrajectories,
    TrajectoryFormat,
    dumped_files,
    export_trajectories,
    source_of,
)
from trackway.wire.trainer import RunInfo
from trackway.wire.trajectory import Trajectory

if TYPE_CHECKING:
    import pandas

    from trackway.deploy.api.given import Function, RowsGiven
    from trackway.deploy.api.services import Services


class Evaluated:
    """A finished evaluation. Printed, it is the table that the command line shows."""

    def __init__(self, store: EvaluationStore) -> None:
        self._store = store
        self.evaluation: Evaluation = store.evaluation()

    @property
    def name(self) -> str:
        """The evaluation's name, which `trackway evaluate RUN` and the console know."""
        return self.evaluation.name

    @property
    def summary(self) -> RolloutSummary:
        """pass@k, scores, lengths and tool use over all rows."""
        assert self.evaluation.summary is not None
        return self.evaluation.summary

    @property
    def score(self) -> float | None:
        """Mean score of the rows, or None when every rollout failed."""
        return self.summary.score.value if self.summary.score else None

    def against(self, other: "Evaluated") -> Paired | None:
        """The difference to another evaluation, row by row, with a 95 % interval, or None without a common row."""
        return self._store.compared(other._store)

    def trajectories(self) -> "pandas.DataFrame":
        """Its trajectories, one per line. For the columns, see `Run.trajectories`."""
        return frame_of(self._store.trajectories())

    def __repr__(self) -> str:
        console = Console(width=100, color_system=None)
        with console.capture() as captured:
            console.print(evaluation_report(self.evaluation, self._store.tasks))
        return captured.get().rstrip()


def frame_of(trajectories: Sequence[Trajectory]) -> "pandas.DataFrame":
    """The trajectories as a table, with the columns of the run's parquet files. Nested values are objects."""
    import pandas

    records = [to_record(trajectory) | trajectory.model_dump(mode="json") for trajectory in trajectories]
    return pandas.DataFrame(records)


class Run:
    """A run, in progress or ended. It goes on by itself. `wait` follows it."""

    def __init__(
        self,
        services: "Services",
        session: RunSession,
        info: RunInfo,
        at_end: ExitStack,
        tools: "Sequence[Function]" = (),
        reward: "Function | None" = None,
    ) -> None:
        self._services = services
        self._session = session
        self._info = info
        self._at_end = at_end
        self.tools = tools
        """Functions of this process that are its tools."""
        self.reward = reward
        """The function of this process that is its reward, or None."""

    @property
    def name(self) -> str:
        """The run's name."""
        return self._info.run

    def then(self, at_end: Callable[[], None]) -> Self:
        """Call this first when `wait` or `stop` ends."""
        self._at_end.callback(at_end)
        return self

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return Path(self._info.folder)

    @property
    def info(self) -> RunInfo:
        """The run's status: state, step, newest metrics. Raises TrackwayError when its services do not answer."""
        with self._services.authorised():
            folder = folder_here(self._info)
            self._info = folder.info() if folder else self._session.info(self.name)
        return self._info

    def wait(self) -> Self:
        """Follow the run to its end, then wait until backends have what it recorded.

        An interrupt makes it save a checkpoint and stop, and is raised again. The same call of `train` resumes it.
        Raises UserError when the run fails.
        """
        with self._until_end():
            self._info = shown.followed(self._session, self.name)
            self._info = shown.delivered(self._session, self._info)
        return self

    def stop(self) -> RunInfo:
        """Save a checkpoint, stop, and wait until that is done."""
        with self._until_end(), run_bar(False) as bar:
            self._info = self._session.stop(self.name, bar.show)
        return self._info

    def metrics(self) -> "pandas.DataFrame":
        """The metrics of the steps so far: a line per step, indexed by it, with verl's names as columns."""
        import pandas

        with self._services.authorised():
            folder = folder_here(self._info)
            rows = folder.rows() if folder else self._session.metrics(self.name)
        steps = pandas.Index([row.step for row in rows], name="step")
        return pandas.DataFrame([row.data for row in rows], index=steps)

    def trajectories(self, step: int | None = None, validation: bool = False) -> "pandas.DataFrame":
        """Return the trajectories of training, or with `validation` of the validations, of one step or of all steps.

        Columns are `score`, `prompt_ids`, `response_ids`, `turns` and the others of the run's parquet files.
        Raises TrackwayError(NOT_FOUND) when there are none, and UserError when this machine lacks the run's folder.
        """
        files = dumped_files(self._own_folder, step, validation)
        return frame_of([trajectory for file in files for trajectory in read_trajectories(file)])

    def evaluate(self, rows: "RowsGiven | None" = None, *, n: int = 1, **options: Any) -> Evaluated:
        """Evaluate the run's newest checkpoint. For the parameters, see `Services.evaluate`."""
        return self._services.evaluate(self, rows, n=n, **options)

    @overload
    def export(
        self, target: str | Path, step: int | None = None, merge: bool = False, *, format: Literal["model"] = "model"
    ) -> Export: ...
    @overload
    def export(
        self,
        target: str | Path,
        step: int | None = None,
        *,
        format: TrajectoryFormat,
        where: str | None = None,
        validation: bool = False,
    ) -> ExportedTrajectories: ...

    def export(
        self,
        target: str | Path,
        step: int | None = None,
        merge: bool = False,
        *,
        format: Literal["model"] | TrajectoryFormat = "model",
        where: str | None = None,
        validation: bool = False,
    ) -> Export | ExportedTrajectories:
        """Write the model or the trajectories to a new folder, or with the format `chat` to a new file.

        format: `model` is the newest checkpoint, or a step's, as a Hugging Face folder. `atif`, `datasets` and `chat`
            are the trajectories of all steps or of one, as with `trackway export --as`.
        merge: put a LoRA adapter into the model's weights; without it the adapter alone is written, as PEFT does.
        where: which trajectories, such as `"score > 0.5 and not failed"`.
        validation: the trajectories of validations in place of those trained on.
        Raises TrackwayError for an existing target, and without such a checkpoint or trajectories. Raises UserError
        when this machine lacks the run's folder.
        """
        if format not in (known := ("model", *get_args(TrajectoryFormat))):
            raise UserError(f"format: expected one of {', '.join(known)}, got {format!r}")
        if merge if format != "model" else validation or where is not None:
            raise UserError(f"expected merge with a model, where and validation with trajectories, got {format=}")
        if format == "model":
            return export_checkpoint(self._own_folder, Path(target), step, merge=merge)
        return export_trajectories(source_of(self._own_folder, step, validation), format, Path(target), where)

    @property
    def _own_folder(self) -> RunFolder:
        if folder := folder_here(self._info):
            return folder
        raise UserError(
            f"run {self.name}: expected its folder {self.folder} on this machine, got none; mount the volume of its "
            "services here"
        )

    @contextmanager
    def _until_end(self) -> Generator[None]:
        """Call the services with their token, and at the end what waits for it."""
        with self._services.authorised(), self._at_end:
            yield

    def __repr__(self) -> str:
        info = self._info
        return f"<run {info.run}: {info.state.value}, step {info.progress}, {info.folder}>"
