"""The run in MLflow: metrics, params, how it stands, and feedback on its traces; spans go there as plain OTLP.

What MLflow does not have yet follows from the run's folder, so any process can send it, at any time:

    metrics.jsonl                  rows after the step that `mlflow.json` names
    tracking/mlflow.json           MLflow's ids of the run, and what it has
    tracking/mlflow_feedback/      feedback and links to traces (feedback_queue.py)
    tracking/mlflow.lock           held while a part is sent

MLflow keeps a metric of the same name, step, timestamp and value once, an assessment of the same id once, and a link
once. It has no such key for runs: a run is found again by its tag, and one made twice, because the answer to the first
request was late, is deleted.
"""

import logging
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel

from trackway.system import atomic_write
from trackway.trainer.config import RunConfig
from trackway.trainer.config.compose import leaves
from trackway.trainer.delivery.feedback_queue import FeedbackQueue
from trackway.trainer.delivery.jobs import Later, Refused, only_sender
from trackway.trainer.delivery.mlflow_api import Metric, MlflowApi, NotThere, Unreachable
from trackway.trainer.delivery.mlflow_feedback import MlflowFeedback
from trackway.trainer.run_state.folder import RunFolder
from trackway.trainer.tracking.row_reader import RowReader
from trackway.wire.trainer import BackendSummary, MetricsRow, RunState

T = TypeVar("T")

logger = logging.getLogger("trackway.trainer")

NAME = "mlflow"
PARAMS_PER_CALL = 100
"""MLflow refuses more params in one batch."""
METRICS_PER_CALL = 1000
"""MLflow refuses more metrics in one batch."""
MAX_PARAM_CHARS = 6000
MAX_NAME_CHARS = 250
DOUBT_S = 600.0
"""A run that a request made which got no answer is looked for so long."""
LOOK_FOR_DOUBLES_S = 20.0

STATUS = {RunState.FINISHED: "FINISHED", RunState.FAILED: "FAILED", RunState.STOPPED: "KILLED"}
"""MLflow's word for a run that has ended; any other is RUNNING."""

_NOT_ALLOWED = re.compile(r"[^/\w.\- :]")


class MlflowState(BaseModel):
    """What MLflow has of a run; `mlflow.json`."""

    uri: str = ""
    experiment_id: str | None = None
    run_id: str | None = None
    is_deleted: bool = False
    """The run was deleted in MLflow: from then on only feedback is sent there."""
    status: str = ""
    """As MLflow has it."""
    has_params: bool = False
    step: int = -1
    """MLflow has the rows up to this step."""
    metrics_lost: int = 0
    feedback_lost: int = 0
    doubtful_creates: int = 0
    """Requests for a new run that got no answer, and whose run was not found yet."""
    doubted_at: float = 0.0
    """Seconds since 1970: the last of them."""
    waits_for: str = ""
    """Why values wait; empty when nothing prevents sending them."""
    lost_because: str = ""
    """Why the most recent loss happened."""


class MlflowRun:
    """What waits for MLflow, of one run. A local database is spoken to through the one server that traces go to."""

    name = NAME

    def __init__(self, folder: RunFolder, config: RunConfig, uri: str) -> None:
        self.uri = uri
        self.queue = FeedbackQueue(feedback_folder(folder))
        self.status = "RUNNING"
        """What MLflow is to say of the run."""
        self.ended_at: int | None = None
        """Milliseconds since 1970, of a run that has ended."""
        self._folder = folder
        self._config = config
        self._api = MlflowApi(uri)
        self._feedback = MlflowFeedback(self._api, config.trackway.feedback_deadline_s)
        self._rows = RowReader(folder.metrics_file)
        self._rewound_to: int | None = None
        self._is_known = False
        self._next_look = 0.0

    @property
    def experiment_id(self) -> str | None:
        """MLflow's id of the experiment; None until it has told it."""
        return read_state(self._folder).experiment_id

    @property
    def run_id(self) -> str | None:
        """MLflow's id of the run; None until it has told it."""
        return read_state(self._folder).run_id

    @property
    def ids(self) -> dict[str, str | None]:
        """What the run's state says of it."""
        return {"mlflow_uri": self.uri, "experiment_id": self.experiment_id, "run_id": self.run_id}

    def end(self, status: str, ended_at: int | None = None) -> None:
        """The run has ended: FINISHED, FAILED, or KILLED for one that was stopped."""
        self.status, self.ended_at = status, ended_at or int(time.time() * 1000)

    def rewind(self, rows: Sequence[MetricsRow]) -> None:
        """The run goes on after these rows: later ones are made again, and sent again."""
        self._rewound_to = rows[-1].step if rows else -1

    def advance(self) -> bool:
        """Send the next part; the run's end goes before its metrics, these before feedback."""
        with only_sender(tracking_folder(self._folder) / f"{NAME}.lock"):
            state = read_state(self._folder)
            before = state.model_copy()
            try:
                return self._advance(state)
            except Later as error:
                state.waits_for = str(error)
                raise
            finally:
                if state != before:
                    write_state(self._folder, state)

    def summary(self) -> BackendSummary:
        """What waits, and what was lost."""
        return mlflow_summary(self._folder, self.status)

    def close(self) -> None:
        """Close the connection."""
        self._api.close()

    def _advance(self, state: MlflowState) -> bool:
        if self._rewound_to is not None:
            state.step, self._rewound_to = min(state.step, self._rewound_to), None
        if not self._is_known:
            self._ensure_run(state)
            return True  # by itself, as the start of a run waits for the ids
        run_id = None if state.is_deleted else state.run_id
        if run_id is not None and self._send_of_run(state, run_id):
            state.waits_for = ""
            return True
        return self._send_feedback(state, run_id)

    def _send_of_run(self, state: MlflowState, run_id: str) -> bool:
        try:
            return (
                self._send_status(state, run_id)
                or self._delete_doubles(state, run_id)
                or self._send_params(state, run_id)
                or self._send_rows(state, run_id)
            )
        except Refused as error:
            self._require_run(state, error)
            raise Later(str(error)) from error

    def _ensure_run(self, state: MlflowState) -> None:
        """Make the run, or find it: by its id, or by its tag where the answer to its making was lost."""
        state.uri = self.uri
        if state.run_id is None:
            self._adopt_earlier(state)
        if state.run_id is not None:
            try:
                stored = self._api.run(state.run_id)
            except NotThere:  # another database stands behind the address now
                logger.warning("MLflow at %s has no run %s; it gets the run from its start", self.uri, state.run_id)
                state.experiment_id = state.run_id = None
                state.step, state.has_params, state.doubtful_creates = -1, False, 0
            else:
                state.status, state.is_deleted = stored.status, stored.is_deleted
        if state.run_id is None:
            self._find_or_create(state)
        self._is_known = True

    def _adopt_earlier(self, state: MlflowState) -> None:
        """A run that an earlier version began: its rows have no timestamps, and all but the last were surely sent."""
        info, first = self._folder.info(), self._rows.after(-1, 1)
        if info.run_id is not None and first and not first[0].timestamp:
            state.run_id, state.experiment_id, state.has_params = info.run_id, info.experiment_id, True
            state.step = info.step - 1

    def _find_or_create(self, state: MlflowState) -> None:
        trainer, uid = self._config.trainer, self._folder.info().uid
        state.experiment_id = self._api.experiment(trainer.project_name)
        found = self._api.runs_of(state.experiment_id, uid)
        if found:
            state.run_id, state.status = found[0], self._api.run(found[0]).status
            return
        state.doubtful_creates, state.doubted_at = state.doubtful_creates + 1, time.time()
        write_state(self._folder, state)  # this process may be killed before it has the answer
        try:
            state.run_id = self._api.create_run(
                state.experiment_id, trainer.experiment_name, uid, _created_at(self._folder)
            )
        except (Unreachable, Refused) as error:
            state.doubtful_creates -= 1
            raise Later(str(error)) from error
        state.doubtful_creates -= 1
        state.status = "RUNNING"

    def _send_status(self, state: MlflowState, run_id: str) -> bool:
        if state.status == self.status:
            return False
        self._api.update_run(run_id, self.status, self.ended_at)
        state.status = self.status
        self._next_look = 0.0
        return True

    def _delete_doubles(self, state: MlflowState, run_id: str) -> bool:
        """Delete runs that were made by requests of ours which got no answer."""
        if not state.doubtful_creates or time.monotonic() < self._next_look:
            return False
        assert state.experiment_id is not None
        for other in self._api.runs_of(state.experiment_id, self._folder.info().uid):
            if other != run_id:
                logger.warning("MLflow made a second run, %s, of run %s; it is deleted", other, run_id)
                self._api.delete_run(other)
        # The first of them may be the run itself: it is found by its tag then. So none is counted off.
        self._next_look = time.monotonic() + LOOK_FOR_DOUBLES_S
        if time.time() - state.doubted_at > DOUBT_S:
            state.doubtful_creates = 0
        return True

    def _send_params(self, state: MlflowState, run_id: str) -> bool:
        if state.has_params:
            return False
        values = leaves(self._config.model_dump(mode="json"))
        params = [(_name(key), str(value)[:MAX_PARAM_CHARS]) for key, value in values.items()]
        for part in _parts(params, PARAMS_PER_CALL):
            self._send_split(state, part, lambda some: self._api.log_params(run_id, dict(some)))
        state.has_params = True
        return True

    def _send_rows(self, state: MlflowState, run_id: str) -> bool:
        rows = self._rows.after(state.step, METRICS_PER_CALL)
        if not rows:
            return False
        created = _created_at(self._folder)
        metrics = [
            Metric(_name(name), value, row.timestamp or created, row.step)
            for row in rows
            for name, value in row.data.items()
        ]
        for part in _parts(metrics, METRICS_PER_CALL):
            self._send_split(state, part, lambda some: self._api.log_metrics(run_id, some))
        state.step = rows[-1].step
        return True

    def _send_split(self, state: MlflowState, items: Sequence[T], send: Callable[[Sequence[T]], None]) -> None:
        """Of items that are refused together, send those that are not refused alone."""
        try:
            send(items)
        except Refused as error:
            self._require_run(state, error)
            if len(items) > 1:
                half = len(items) // 2
                self._send_split(state, items[:half], send)
                self._send_split(state, items[half:], send)
                return
            if not state.metrics_lost:
                logger.warning("mlflow: %s is lost: %s; later ones are counted", items[0], error)
            state.metrics_lost += 1
            state.lost_because = str(error)

    def _require_run(self, state: MlflowState, error: Refused) -> None:
        """Raise Later when the refusal is that of the run: it is deleted, or the database is another one."""
        if state.run_id is not None:
            try:
                is_there = not self._api.run(state.run_id).is_deleted
            except NotThere:
                is_there = False
            if not is_there:
                self._is_known = False
                raise Later(str(error)) from error

    def _send_feedback(self, state: MlflowState, run_id: str | None) -> bool:
        dropped = self.queue.take_dropped()
        if dropped:
            state.feedback_lost, state.lost_because = state.feedback_lost + dropped, "no room on disk"
        sent = self.queue.send(lambda assessments: self._feedback.send(assessments, run_id))
        if sent is not None and sent.lost:
            state.feedback_lost, state.lost_because = state.feedback_lost + sent.lost, sent.reason
        if sent is not None and sent.is_away:
            raise Later(sent.reason)
        state.waits_for = ""
        return sent is not None


def tracking_folder(folder: RunFolder) -> Path:
    """Where a run keeps what its backends do not have yet."""
    return folder.path / "tracking"


def feedback_folder(folder: RunFolder) -> Path:
    """Where feedback waits for MLflow."""
    return tracking_folder(folder) / f"{NAME}_feedback"


def read_state(folder: RunFolder) -> MlflowState:
    """What MLflow has of the run; nothing where the file is missing or damaged, as the run is found by its tag."""
    try:
        return MlflowState.model_validate_json(_file(folder).read_text())
    except (OSError, ValueError):
        return MlflowState()


def write_state(folder: RunFolder, state: MlflowState) -> None:
    """Keep what MLflow has of the run. Raises StorageError."""
    atomic_write(_file(folder), state.model_dump_json(indent=2))


def mlflow_summary(folder: RunFolder, status: str) -> BackendSummary:
    """What waits for MLflow, and what was lost, of a run that stands as `status` says in MLflow's words."""
    state, queue = read_state(folder), FeedbackQueue(feedback_folder(folder))
    waits = not state.is_deleted
    return BackendSummary(
        backend=NAME,
        rows_waiting=RowReader(folder.metrics_file).count_after(state.step) if waits else 0,
        feedback_waiting=queue.waiting,
        end_waiting=waits and status != "RUNNING" and state.status != status,
        metrics_lost=state.metrics_lost,
        feedback_lost=state.feedback_lost,
        waits_for=state.waits_for,
        lost_because=state.lost_because,
    )


def _file(folder: RunFolder) -> Path:
    return tracking_folder(folder) / f"{NAME}.json"


def _created_at(folder: RunFolder) -> int:
    return int((folder.path / "config.json").stat().st_mtime * 1000)


def _name(name: str) -> str:
    """As MLflow allows it."""
    return _NOT_ALLOWED.sub("_", name.replace("@", "_at_"))[:MAX_NAME_CHARS]


def _parts(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
