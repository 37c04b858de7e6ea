"""Feedback as assessments of MLflow traces, and links of traces to the run.

MLflow has no route for several values, and its search does not look inside a value. So each value is one request, and
`feedback.fate = 'used'` and `feedback.reward > 0.5` find their traces. An assessment's id is derived from trace and
name, so a value that is sent twice is stored once.
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


class MlflowFeedback:
    """Sends assessments one value at a time."""

    def __init__(self, api: MlflowApi, deadline_s: float) -> None:
        """`deadline_s`: how long a trace may be missing from a reachable MLflow before its feedback is dropped."""
        self._api = api
        self._deadline_s = deadline_s
        self._missing_since: dict[str, float] = {}

    def send(self, assessments: list[Assessment], run_id: str | None) -> Sent:
        """Send as many assessments as fit in TURN_S; links are dropped when `run_id` is None."""
        sent = Sent(left=list(assessments))
        end = time.monotonic() + TURN_S
        try:
            self._link(sent, run_id)
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

    def _send(self, assessment: Assessment, sent: Sent) -> None:
        """Send the values, and remove the assessment from `sent.left` unless its trace has not arrived."""
        trace_id = assessment.trace_id
        for name, value in assessment.values.items():
            try:
                self._api.assess(trace_id, _body(trace_id, name, value))
            except NotThere as error:
                if not self._is_overdue(trace_id):
                    sent.reason = "the traces of some feedback have not arrived"
                    return
                sent.lost, sent.reason = sent.lost + len(assessment.values), f"no such trace: {error}"
                break
            except Refused as error:
                sent.lost, sent.reason = sent.lost + 1, f"feedback {name} for trace {trace_id}: {error}"
        self._missing_since.pop(trace_id, None)
        sent.left.remove(assessment)

    def _is_overdue(self, trace_id: str) -> bool:
        now = time.monotonic()
        return now - self._missing_since.setdefault(trace_id, now) >= self._deadline_s


def _body(trace_id: str, name: str, value: Value) -> dict[str, JsonValue]:
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
