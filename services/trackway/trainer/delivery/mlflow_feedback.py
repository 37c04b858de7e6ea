"""Feedback as assessments of MLflow traces, and links of traces to the run.

Each value is an assessment of its own, because MLflow's search does not look inside a value: `feedback.fate = 'used'`
and `feedback.reward > 0.5` find their traces. The server of a local database takes many in one request; MLflow's own
route takes one. An assessment's id is derived from trace and name, so a value that is sent twice is stored once.
"""

import logging
import math
import time
import uuid
from dataclasses import replace
from datetime import UTC, datetime

from pydantic import JsonValue

from trackway.trainer.delivery.assessment import Assessment, Value
from trackway.trainer.delivery.feedback_queue import Sent
from trackway.trainer.delivery.jobs import Later, Refused
from trackway.trainer.delivery.mlflow_api import MlflowApi, NotThere

logger = logging.getLogger("trackway.trainer")

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
        """Send as many assessments as fit in TURN_S; links are dropped when `run_id` is None."""
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
        """Send the values in few requests; False when the server takes one value per request."""
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
        """Whether to wait for a missing trace; after the deadline its values are lost."""
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
        "feedback": {"value": value if is_number else str(value)},
    }
