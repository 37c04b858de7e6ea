"""The run in Trackio: the metrics of each step, and its traced trajectories."""

from collections import defaultdict
from typing import TYPE_CHECKING

from trackway.system import atomic_write
from trackway.tracing.redaction import Redact, redacted_value
from trackway.trainer.config import RunConfig
from trackway.trainer.run_state.folder import RunFolder
from trackway.trainer.run_state.trajectory_dump import read_trajectories
from trackway.wire.tracing import TraceBackend
from trackway.wire.trainer import MetricsRow
from trackway.wire.trajectory import Trajectory

if TYPE_CHECKING:
    from trackio import Trace
    from trackio.run import Run

NAME = "trackio"


class TrackioRun:
    """A Trackio run under verl's names, on this machine (TRACKIO_DIR) or where Trackio's other variables say.

    It has the metrics if `trainer.logger` names Trackio, and the trajectories if `trace.backend` does. These are read
    from the step's files and logged with its row, so a resumed run neither lacks nor repeats any.
    """

    def __init__(self, folder: RunFolder, config: RunConfig, redact: Redact | None = None) -> None:
        self._folder = folder
        self._config = config
        self._redact = redact
        self._metrics = NAME in config.trainer.logger
        self._traces = TraceBackend.TRACKIO in config.actor_rollout_ref.rollout.trace.backend
        self._run: Run | None = None
        self._first_step = 0

    def open(self) -> None:
        """Start the run, or resume the one whose id is in the run's folder."""
        file = self._folder.path / "trackio_run_id"
        known = file.read_text() if file.is_file() else None
        run = self._begin("never" if known is None else "allow")
        if known not in (None, run.id):  # Trackio resumes the newest run of that name
            run = self._begin("never")
        atomic_write(file, run.id)
        # The step after the last one that Trackio has.
        self._run, self._first_step = run, run._next_step

    def log(self, row: MetricsRow) -> None:
        """Add the row and the trajectories of its step unless Trackio has them."""
        data: dict[str, float | list[Trace]] = {**row.data} if self._metrics else {}
        data |= self._traces_of(row.step) if self._traces else {}
        if row.step >= self._first_step and data:
            self._started().log(data, step=row.step)

    def finish(self, status: str) -> None:
        """End the run; Trackio has no status."""
        self._started().finish()

    def _begin(self, resume: str) -> "Run":
        import trackio

        trainer = self._config.trainer
        return trackio.init(
            project=trainer.project_name if self._metrics else self._config.trace_project,
            name=trainer.experiment_name if self._metrics else self._config.trace_experiment,
            config=self._config.model_dump(mode="json"),
            resume=resume,
            embed=False,
            auto_log_cpu=False,  # on this machine alone, and under names that no other logger has
            auto_log_gpu=False,
        )

    def _traces_of(self, step: int) -> dict[str, list["Trace"]]:
        traces: dict[str, list[Trace]] = defaultdict(list)
        for name in (f"step_{step}", f"val_step_{step}"):
            path = self._folder.path / "trajectories" / f"{name}.parquet"
            for trajectory in read_trajectories(path) if path.is_file() else ():
                if trajectory.trace_id is not None:
                    traces[f"rollout_trace/{trajectory.agent_name}"].append(self._trace(trajectory))
        return traces

    def _trace(self, trajectory: Trajectory) -> "Trace":
        import trackio

        with_text = self._config.actor_rollout_ref.rollout.trace.token2text
        content = {"messages": _messages(trajectory) if with_text else [], "metadata": _metadata(trajectory)}
        if self._redact is not None:
            content = redacted_value(content, self._redact)
        return trackio.Trace(**content)

    def _started(self) -> "Run":
        if self._run is None:
            raise RuntimeError("the Trackio run did not start")
        return self._run


def _messages(trajectory: Trajectory) -> list[dict[str, object]]:
    """The whole conversation in OpenAI's form."""
    messages = [*trajectory.prompt_messages, *(message for turn in trajectory.turns for message in turn.messages)]
    return [message.model_dump(mode="json", exclude_none=True) for message in messages]


def _metadata(trajectory: Trajectory) -> dict[str, object]:
    """verl's five tags and its `status`, and what the trajectory came to; seconds as Trackio's `duration_ms`."""
    reward = trajectory.reward
    error = {} if trajectory.error is None else {"error": trajectory.error.message}
    return {
        **trajectory.tags.model_dump(mode="json", by_alias=True),
        "status": "success" if trajectory.error is None else "error",
        **error,
        "duration_ms": 1000 * trajectory.timings.total,
        "session_id": trajectory.id,
        "trace_id": trajectory.trace_id,
        "data_source": trajectory.data_source,
        "stop_reason": trajectory.stop_reason.value,
        "num_turns": trajectory.num_turns,
        "prompt_tokens": len(trajectory.prompt_ids),
        "response_tokens": len(trajectory.response_ids),
        **({} if reward is None else {"reward": reward.score, "reward_components": reward.components}),
        "incidents": [incident.value for incident in trajectory.incidents],
    }
