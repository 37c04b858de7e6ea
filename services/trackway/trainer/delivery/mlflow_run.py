"""The run in MLflow: metrics, params, tags, status, and feedback on its traces. Spans are sent separately, as OTLP.

The unsent data is determined by the run's folder, so any process can send it at any time:

    metrics.jsonl                  rows after the step recorded in `mlflow.json`
    tracking/mlflow.json           MLflow's ids of the run, and the data MLflow has received
    tracking/mlflow_feedback/      feedback and links to traces (feedback_queue.py)
    tracking/mlflow.lock           held while a part is sent

MLflow stores a metric with the same name, step, timestamp and value once, an assessment with the same id once, and a
link once. Runs have no such key: a run is found again by its tag.

Feedback becomes assessments of traces. Each value is an assessment of its own, because MLflow's search does not look
inside a value: `feedback.fate = 'used'` and `feedback.reward > 0.5` find their traces. The server of a local database
takes many in one request. MLflow's own route takes one. An assessment's id is derived from trace and name, so a value
that is sent twice is stored once.
"""

import logging
import math
import os
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, Field, JsonValue

from trackway.run_config import RunConfig
from trackway.run_config.compose import leaves
from trackway.system import atomic_write
from trackway.trainer.delivery.feedback_queue import GROUND_TRUTH, Assessment, FeedbackQueue, Sent, Value
from trackway.trainer.delivery.jobs import Later, Refused, only_sender
from trackway.trainer.delivery.mlflow_api import Metric, MlflowApi, NotThere
from trackway.trainer.run_state.folder import RunFolder
from trackway.wire.service import OwnCode
from trackway.wire.trainer import BackendSummary, MetricsRow, RunState

TURN_S = 2.0
"""Longest time spent on feedback before the run's status and metrics are sent again."""
LINKS_PER_CALL = 100
"""MLflow's limit."""
TRACES_PER_CALL = 200
"""Traces whose values are sent in one request, where the server takes several."""


class MlflowFeedback:
    """Sends links and assessments."""

    def __init__(self, api: MlflowApi, deadline_s: float) -> None:
        """`deadline_s`: how long a trace may be missing from a reachable MLflow before its feedback is dropped."""
        self._api = api
        self._deadline_s = deadline_s
        self._missing_since: dict[str, float] = {}
        self._takes_many = True

    def send(self, assessments: list[Assessment], run_id: str | None) -> Sent:
        """Send as many assessments as fit in TURN_S. Links are dropped when `run_id` is None."""
        sent = Sent(left=list(assessments))
        end = time.monotonic() + TURN_S
        try:
            self._link(sent, run_id)
            if sent.left and self._takes_many:
                self._takes_many = self._send_together(sent)
                if self._takes_many:
                    return sent
            for assessment in list(sent.left):
                if time.monotonic() > end:
                    break
                self._send(assessment, sent)
        except Later as error:
            sent.reason, sent.is_away = str(error), True
        return sent

    def _link(self, sent: Sent, run_id: str | None) -> None:
        links = [assessment.trace_id for assessment in sent.left if assessment.link]
        if run_id is not None:
            for start in range(0, len(links), LINKS_PER_CALL):
                part = links[start : start + LINKS_PER_CALL]
                try:
                    self._api.link(part, run_id)
                except Refused as error:
                    sent.lost, sent.reason = sent.lost + len(part), f"traces are not linked to the run: {error}"
                    logger.warning(sent.reason)
        unlinked = [replace(assessment, link=False) for assessment in sent.left]
        sent.left = [assessment for assessment in unlinked if assessment.values]

    def _send_together(self, sent: Sent) -> bool:
        """Send the values in few requests. False when the server takes one value per request."""
        unsent, waiting = sent.left, list[Assessment]()
        while unsent:
            part = unsent[:TRACES_PER_CALL]
            values = [(assessment.trace_id, *value) for assessment in part for value in assessment.values.items()]
            missing = self._api.assess_together([assessment_body(*value) for value in values])
            if missing is None:
                return False
            for assessment in part:
                if assessment.trace_id not in missing:
                    self._missing_since.pop(assessment.trace_id, None)
                elif self._still_waits(assessment, sent, "MLflow has not received it"):
                    waiting.append(assessment)
            unsent = unsent[TRACES_PER_CALL:]
            sent.left = [*waiting, *unsent]
        return True

    def _send(self, assessment: Assessment, sent: Sent) -> None:
        """Send the values, and remove the assessment from `sent.left` unless its trace has not arrived."""
        trace_id = assessment.trace_id
        for name, value in assessment.values.items():
            if name == GROUND_TRUTH and "fate" in assessment.values:
                continue  # a request more for each trajectory of the training; validations have few
            try:
                self._api.assess(trace_id, assessment_body(trace_id, name, value))
            except NotThere as error:
                if self._still_waits(assessment, sent, str(error)):
                    return
                break
            except Refused as error:
                sent.lost, sent.reason = sent.lost + 1, f"feedback {name} for trace {trace_id}: {error}"
        self._missing_since.pop(trace_id, None)
        sent.left.remove(assessment)

    def _still_waits(self, assessment: Assessment, sent: Sent, why: str) -> bool:
        """Return whether to wait for a missing trace. After the deadline its values are lost."""
        if not self._is_overdue(assessment.trace_id):
            sent.reason = "the traces of some feedback have not arrived"
            return True
        del self._missing_since[assessment.trace_id]
        sent.lost, sent.reason = sent.lost + len(assessment.values), f"no such trace: {why}"
        return False

    def _is_overdue(self, trace_id: str) -> bool:
        now = time.monotonic()
        return now - self._missing_since.setdefault(trace_id, now) >= self._deadline_s


def assessment_body(trace_id: str, name: str, value: Value) -> dict[str, JsonValue]:
    """A value as MLflow's route takes it."""
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    is_number = isinstance(value, int | float) and math.isfinite(value)
    return {
        "assessment_id": f"a-{uuid.uuid5(uuid.NAMESPACE_OID, f'{trace_id}/{name}').hex}",
        "assessment_name": name,
        "trace_id": f"tr-{trace_id}",
        "source": {"source_type": "CODE", "source_id": "trackway.trainer"},
        "create_time": now,
        "last_update_time": now,
        "expectation" if name == GROUND_TRUTH else "feedback": {"value": value if is_number else str(value)},
    }


_BLOCK = 1 << 16
_STEP = re.compile(rb'\{"step":\s*(-?\d+)')


class RowReader:
    """Rows in file order, by increasing step. Truncated and damaged lines are skipped."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def after(self, step: int, values: int) -> list[MetricsRow]:
        """The first rows after the step, with at most `values` values in total, but at least one row."""
        rows: list[MetricsRow] = []
        count = 0
        for line in self._lines_after(step):
            try:
                row = MetricsRow.model_validate_json(line)
            except ValueError:
                continue
            count += len(row.data)
            if rows and count > values:
                break
            rows.append(row)
        return rows

    def count_after(self, step: int) -> int:
        """The number of rows after the step."""
        return len(self._lines_after(step))

    def _lines_after(self, step: int) -> list[bytes]:
        """Read backwards in blocks until a row of the step or an earlier one."""
        try:
            with self._file.open("rb") as file:
                offset = file.seek(0, os.SEEK_END)
                tail = b""
                while offset > 0:
                    size = min(max(_BLOCK, len(tail)), offset)
                    offset -= size
                    file.seek(offset)
                    tail = file.read(size) + tail
                    first = tail.find(b"\n") + 1 if offset else 0  # skip the partial line at the block's start
                    if (earliest := _STEP.match(tail, first)) and int(earliest[1]) <= step:
                        break
        except FileNotFoundError:
            return []
        lines = tail.split(b"\n")[:-1]  # without the incomplete last line
        return [line for line in lines if (match := _STEP.match(line)) and int(match[1]) > step]


T = TypeVar("T")

logger = logging.getLogger("trackway.trainer")

NAME = "mlflow"
PARAMS_PER_CALL = 100
"""MLflow's limit on params per batch."""
METRICS_PER_CALL = 1000
"""MLflow's limit on metrics per batch."""
MAX_PARAM_CHARS = 6000
MAX_NAME_CHARS = 250

STATUS = {RunState.FINISHED: "FINISHED", RunState.FAILED: "FAILED", RunState.STOPPED: "KILLED"}
"""MLflow's status of an ended run. Any other run is RUNNING."""

_NOT_ALLOWED = re.compile(r"[^/\w.\- :]")


class MlflowState(BaseModel):
    """The data of a run that MLflow has received; `mlflow.json`."""

    uri: str = ""
    experiment_id: str | None = None
    run_id: str | None = None
    is_deleted: bool = False
    """The run was deleted in MLflow. From then on only feedback is sent."""
    status: str = ""
    """The run's status in MLflow."""
    has_params: bool = False
    tags: dict[str, str] = Field(default_factory=dict)
    """The tags that MLflow has."""
    step: int = -1
    """MLflow has the rows up to this step."""
    metrics_lost: int = 0
    feedback_lost: int = 0
    waits_for: str = ""
    """Why data cannot be sent. Empty when it can."""
    lost_because: str = ""
    """Why the most recent loss happened."""


class MlflowRun:
    """Delivery of one run to MLflow. A local database is accessed through the server that also receives traces."""

    name = NAME

    def __init__(self, folder: RunFolder, config: RunConfig, uri: str) -> None:
        self.uri = uri
        self.queue = FeedbackQueue(feedback_folder(folder))
        self.status = "RUNNING"
        """The status to set in MLflow."""
        self.ended_at: int | None = None
        """End of the run in milliseconds since 1970. None while it is active."""
        self._folder = folder
        self._config = config
        info = folder.info()
        self._tags = code_tags(info.code) | ({} if info.policy is None else {"trackway.policy": info.policy})
        self._api = MlflowApi(uri)
        self._feedback = MlflowFeedback(self._api, config.trackway.feedback_deadline_s)
        self._rows = RowReader(folder.metrics_file)
        self._rewound_to: int | None = None
        self._is_known = False

    @property
    def experiment_id(self) -> str | None:
        """MLflow's id of the experiment. None until MLflow has returned it."""
        return read_state(self._folder).experiment_id

    @property
    def run_id(self) -> str | None:
        """MLflow's id of the run. None until MLflow has returned it."""
        return read_state(self._folder).run_id

    @property
    def ids(self) -> dict[str, str | None]:
        """The fields for the run's state."""
        return {"mlflow_uri": self.uri, "experiment_id": self.experiment_id, "run_id": self.run_id}

    def end(self, status: str, ended_at: int | None = None) -> None:
        """End the run with FINISHED, FAILED, or KILLED for a stopped run; sent by `advance`."""
        self.status, self.ended_at = status, ended_at or int(time.time() * 1000)

    def rewind(self, rows: Sequence[MetricsRow]) -> None:
        """Continue after these rows: later rows are computed and sent again."""
        self._rewound_to = rows[-1].step if rows else -1

    def advance(self) -> bool:
        """Send the next part, in the order status, params, tags, metrics, feedback."""
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
        """The counts of queued and lost data."""
        return mlflow_summary(self._folder, self.status)

    def close(self) -> None:
        """Close the connection."""
        self._api.close()

    def _advance(self, state: MlflowState) -> bool:
        if self._rewound_to is not None:
            state.step, self._rewound_to = min(state.step, self._rewound_to), None
        if not self._is_known:
            self._ensure_run(state)
            return True  # nothing more in this step: the start of a run waits for the ids
        run_id = None if state.is_deleted else state.run_id
        if run_id is not None and self._send_run_data(state, run_id):
            state.waits_for = ""
            return True
        return self._send_feedback(state, run_id)

    def _send_run_data(self, state: MlflowState, run_id: str) -> bool:
        try:
            return (
                self._send_status(state, run_id)
                or self._send_params(state, run_id)
                or self._send_tags(state, run_id)
                or self._send_rows(state, run_id)
            )
        except Refused as error:
            self._require_run(state, error)
            raise Later(str(error)) from error

    def _ensure_run(self, state: MlflowState) -> None:
        """Create the run, or find it by its id, or by its tag when the answer to its creation was lost."""
        state.uri = self.uri
        if state.run_id is not None:
            try:
                stored = self._api.run(state.run_id)
            except NotThere:  # the address now serves another database
                logger.warning("MLflow at %s has no run %s; the run is sent from its start", self.uri, state.run_id)
                state.experiment_id = state.run_id = None
                state.step, state.has_params, state.tags = -1, False, {}
            else:
                state.status, state.is_deleted = stored.status, stored.is_deleted
        if state.run_id is None:
            self._find_or_create(state)
        self._is_known = True

    def _find_or_create(self, state: MlflowState) -> None:
        trainer, uid = self._config.trainer, self._folder.info().uid
        state.experiment_id = self._api.experiment(trainer.project_name)
        run_ids = self._api.runs_of(state.experiment_id, uid)
        if run_ids:
            state.run_id, state.status = run_ids[0], self._api.run(run_ids[0]).status
            return
        try:
            state.run_id = self._api.create_run(
                state.experiment_id, trainer.experiment_name, uid, _created_at(self._folder)
            )
        except Refused as error:
            raise Later(str(error)) from error
        state.status = "RUNNING"

    def _send_status(self, state: MlflowState, run_id: str) -> bool:
        if state.status == self.status:
            return False
        self._api.update_run(run_id, self.status, self.ended_at)
        state.status = self.status
        return True

    def _send_params(self, state: MlflowState, run_id: str) -> bool:
        if state.has_params:
            return False
        values = leaves(self._config.model_dump(mode="json"))
        params = [(_name(key), str(value)[:MAX_PARAM_CHARS]) for key, value in values.items()]
        for part in _parts(params, PARAMS_PER_CALL):
            self._send_split(state, part, lambda batch: self._api.log_params(run_id, dict(batch)))
        state.has_params = True
        return True

    def _send_tags(self, state: MlflowState, run_id: str) -> bool:
        if state.tags == self._tags:
            return False
        outdated = dict.fromkeys(state.tags, "")  # of own code that a resumed run no longer has
        self._api.set_tags(run_id, outdated | self._tags)
        state.tags = self._tags
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
            self._send_split(state, part, lambda batch: self._api.log_metrics(run_id, batch))
        state.step = rows[-1].step
        return True

    def _send_split(self, state: MlflowState, items: Sequence[T], send: Callable[[Sequence[T]], None]) -> None:
        """Send the items. If MLflow refuses them, bisect to send those that it accepts."""
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
                logger.warning("mlflow: %s is lost: %s; later losses are only counted", items[0], error)
            state.metrics_lost += 1
            state.lost_because = str(error)

    def _require_run(self, state: MlflowState, error: Refused) -> None:
        """Raise Later when the request was refused because the run is deleted or the database was replaced."""
        if state.run_id is not None:
            try:
                exists = not self._api.run(state.run_id).is_deleted
            except NotThere:
                exists = False
            if not exists:
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
    """The folder for data that the run's backends have not received."""
    return folder.path / "tracking"


def feedback_folder(folder: RunFolder) -> Path:
    """The folder of the feedback queue for MLflow."""
    return tracking_folder(folder) / f"{NAME}_feedback"


def read_state(folder: RunFolder) -> MlflowState:
    """The stored state. The default when the file is missing or damaged, since the run is found by its tag."""
    try:
        return MlflowState.model_validate_json(_file(folder).read_text())
    except (OSError, ValueError):
        return MlflowState()


def write_state(folder: RunFolder, state: MlflowState) -> None:
    """Store the state. Raises StorageError."""
    atomic_write(_file(folder), state.model_dump_json(indent=2))


def mlflow_summary(folder: RunFolder, status: str) -> BackendSummary:
    """The counts of queued and lost data of a run. `status` is its current status in MLflow's terms."""
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
    """The name with the characters that MLflow does not allow replaced."""
    return _NOT_ALLOWED.sub("_", name.replace("@", "_at_"))[:MAX_NAME_CHARS]


def code_tags(code: Mapping[str, OwnCode]) -> dict[str, str]:
    """MLflow's tags for each service's own code: the digest of its files, and the Git commit if there is one."""
    digests = {f"trackway.code.{service}": own.digest for service, own in code.items()}
    return digests | {f"trackway.code.{service}.commit": own.commit for service, own in code.items() if own.commit}


def _parts(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
