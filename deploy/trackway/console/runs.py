"""The runs of an outputs folder, read from their files."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import JsonValue, TypeAdapter, ValidationError

from trackway.console.replies import RunPage, RunSummary, Series, TrajectoryFile
from trackway.console.trajectory_files import trajectory_files
from trackway.evaluation.summary import Evaluation
from trackway.trainer.run_state.folder import EVALUATION_FILE, RunFolder, outputs_folders, parse_rows, run_folders
from trackway.trainer.run_state.heartbeat import LivenessMonitor
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.trainer import ENDED, MetricsRow

REWARD = "critic/score/mean"
_CONFIG = TypeAdapter(dict[str, JsonValue])
_FAILED = ("training/rollout_failure/failed_trajectories", "val-aux/failed_trajectories")
_Stamp = tuple[int, int]
"""Bytes of a file, and nanoseconds since 1970 of its last change."""


@dataclass(frozen=True)
class _Metrics:
    """Part of a metrics file that was read."""

    rows: list[MetricsRow] = field(default_factory=list[MetricsRow])
    end: int = 0
    """Bytes of the lines that were read."""
    last_line: bytes = b""
    """The last of these, which a file that was rewritten does not have there."""

    def read_on(self, file: Path) -> "_Metrics":
        """These and the lines appended since. All lines of a file that was rewritten."""
        if not file.is_file():
            return _Metrics()
        with file.open("rb") as opened:
            opened.seek(self.end - len(self.last_line))
            if opened.read(len(self.last_line)) != self.last_line:
                return _Metrics().read_on(file)
            *lines, _ = opened.read().split(b"\n")  # the last one may be half written
        if not lines:
            return self
        end = self.end + sum(len(line) + 1 for line in lines)
        return _Metrics([*self.rows, *parse_rows(lines)], end, lines[-1] + b"\n")


class Runs:
    """Finds runs by key, and keeps the rows that were read of them."""

    def __init__(self, outputs: Path) -> None:
        self.outputs = outputs.resolve()
        self._folders: dict[str, RunFolder] = {}
        self._metrics: dict[str, _Metrics] = {}
        self._liveness: dict[str, LivenessMonitor] = {}

    def all(self) -> list[tuple[str, RunFolder]]:
        """Keys and folders, the newest first."""
        if RunFolder(self.outputs).exists:
            found = [RunFolder(self.outputs)]
        else:
            found = [folder for outputs in outputs_folders(self.outputs) for folder in run_folders(outputs)]
        keyed = [(self._key(folder), folder) for folder in found]
        # Kept objects remember the last state that could be read.
        kept = [(key, self._folders.setdefault(key, folder)) for key, folder in keyed]
        return sorted(kept, key=lambda item: _changed(item[1]), reverse=True)

    def find(self, key: str) -> RunFolder:
        """The run of a key. Raises TrackwayError(NOT_FOUND)."""
        folder = self._folders.get(key) or dict(self.all()).get(key)
        if folder is None or not folder.exists:
            known = ", ".join(key for key, _ in self.all()[:10]) or "none"
            message = f"expected a run of {self.outputs} ({known}), got {key!r}; open the list of runs"
            raise TrackwayError(ErrorCode.NOT_FOUND, message)
        return folder

    def rows(self, key: str) -> list[MetricsRow]:
        """The metrics of each step."""
        metrics = self._metrics.get(key, _Metrics()).read_on(self.find(key).metrics_file)
        self._metrics[key] = metrics
        return metrics.rows

    def summary(self, key: str) -> RunSummary:
        """The run as the list shows it."""
        folder = self.find(key)
        info, rows = folder.info(), self.rows(key)
        ended = info.state in ENDED
        seconds, tokens = _total(rows, "timing_s/step"), _total(rows, "perf/total_num_tokens")
        gpus = _gpus(folder)
        return RunSummary(
            key=key,
            name=info.run,
            state=info.state,
            alive=None if ended else self._liveness.setdefault(key, LivenessMonitor()).alive(folder),
            step=info.step,
            total_steps=info.total_steps,
            restarts=info.restarts,
            policy=info.policy,
            message=info.message,
            changed=_changed(folder) // 1_000_000,
            reward=series(rows, REWARD),
            accuracy=series(rows, next(iter(accuracies(rows)), "")),
            failed=int(sum(value for row in rows for name in _FAILED if (value := row.data.get(name, 0.0)) > 0)),
            seconds=seconds,
            tokens=None if tokens is None else int(tokens),
            gpu_seconds=None if seconds is None or not gpus else seconds * gpus,
        )

    def page(self, key: str) -> RunPage:
        """The run with what it waits for, its newest metrics and its files."""
        folder, summary = self.find(key), self.summary(key)
        info, activity = folder.info(), folder.activity()
        newest = {name: value for row in self.rows(key) for name, value in row.data.items()}
        return RunPage(
            summary=summary,
            folder=str(folder.path),
            waits=activity.waits if summary.alive else [],
            rollouts=activity.rollouts or info.rollout_states,
            metrics={name: finite(value) for name, value in sorted(newest.items())},
            files=[
                TrajectoryFile(step=file.step, validation=file.validation, bytes=file.bytes)
                for file in trajectory_files(folder)
            ],
            mlflow=mlflow_page(folder),
            weave=weave_page(folder),
            evaluation=evaluation_of(folder),
            traces=info.traces,
            tracking=info.tracking,
        )

    def stamp(self, key: str) -> str:
        """Changes whenever a file that `page` reads does, but for the beats of the run's process."""
        folder = self.find(key)
        names = ("state.json", "metrics.jsonl", "activity.json", "trajectories")
        return "-".join(f"{size:x}.{at:x}" for size, at in (stamp_of(folder.path / name) for name in names))

    def _key(self, folder: RunFolder) -> str:
        return folder.name if folder.path == self.outputs else folder.path.relative_to(self.outputs).as_posix()


def evaluation_of(folder: RunFolder) -> Evaluation | None:
    """The evaluation that a run is, or None for one that trains."""
    try:
        return Evaluation.model_validate_json((folder.path / EVALUATION_FILE).read_bytes())
    except (OSError, ValidationError):
        return None


def series(rows: Iterable[MetricsRow], name: str) -> Series:
    """The steps that have the metric, and its values."""
    points = [(row.step, row.data[name]) for row in rows if name in row.data]
    return Series(steps=[step for step, _ in points], values=[finite(value) for _, value in points])


def _total(rows: Iterable[MetricsRow], name: str) -> float | None:
    values = [value for row in rows if math.isfinite(value := row.data.get(name, math.nan))]
    return sum(values) if values else None


def config_of(folder: RunFolder) -> dict[str, JsonValue]:
    """The nested keys of the run's configuration. None if it cannot be read."""
    try:
        return _CONFIG.validate_json((folder.path / "config.json").read_bytes())
    except (OSError, ValidationError):
        return {}


def _gpus(folder: RunFolder) -> int:
    """GPUs of the run's configuration."""
    match config_of(folder).get("trainer"):
        case {"n_gpus_per_node": int(gpus), "nnodes": int(nodes)}:
            return gpus * nodes
        case _:
            return 0


def accuracies(rows: Sequence[MetricsRow]) -> list[str]:
    """Names of the mean validation accuracies in verl's naming, which also has the best of several rollouts."""
    names = {name for row in rows for name in row.data}
    return sorted(name for name in names if name.startswith("val-core/") and "/acc/mean@" in name)


def finite(value: float) -> float | None:
    """The value, or None for NaN and the infinities, which JSON has no numbers for."""
    return value if math.isfinite(value) else None


def mlflow_page(folder: RunFolder, trace_id: str | None = None) -> str | None:
    """MLflow's page of the run's traces, or of one trace, or None where MLflow is not a web server."""
    info = folder.info()
    if not info.experiment_id or not (info.mlflow_uri or "").startswith(("http://", "https://")):
        return None
    trace = f"?selectedEvaluationId=tr-{trace_id}" if trace_id else ""
    return f"{(info.mlflow_uri or '').rstrip('/')}/#/experiments/{info.experiment_id}/traces{trace}"


def weave_page(folder: RunFolder, span_id: str | None = None) -> str | None:
    """Weave's page of the run's traces, or of the call of a span. None without traces there."""
    project = folder.info().weave_url or ""
    if not project.startswith(("http://", "https://")):
        return None
    return f"{project}/r/call/{span_id}" if span_id else f"{project}/weave/traces"


def stamp_of(path: Path) -> _Stamp:
    """Size and time of a file. Zeros where there is none."""
    try:
        status = path.stat()
    except OSError:
        return 0, 0
    return status.st_size, status.st_mtime_ns


def _changed(folder: RunFolder) -> int:
    return stamp_of(folder.path / "state.json")[1]
