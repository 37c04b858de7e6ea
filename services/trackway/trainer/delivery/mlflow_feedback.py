"""Feedback as assessments of MLflow traces, and links of traces to the run.

There is no route for several values, and parts of one value cannot be searched by, so each value is a request:
`feedback.fate = 'used'` and `feedback.reward > 0.5` find their traces. An assessment's id is made of trace and name, so
a value that is sent twice is kept once.
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
"""After this long the run's metrics and its end get their turn."""
LINKS_PER_CALL = 100
"""MLflow refuses more."""


class MlflowFeedback:
    """Sends assessments one value at a time."""

    def __init__(self, api: MlflowApi, patience_s: float) -> None:
        """`patience_s`: how long a trace may be missing from an MLflow that answers, before its feedback is lost."""
        self._api = api
        self._patience_s = patience_s
        self._missing_since: dict[str, float] = {}

    def send(self, assessments: list[Assessment], run_id: str | None) -> Sent:
        """Send as many as there is time for; links are left out where there is no run to link to."""
        sent = Sent(left=list(assessments))
        end = time.monotonic() + TURN_S
        try:
            self._link(sent, run_id)
            for one in list(sent.left):
                if time.monotonic() > end:
                    break
                self._send(one, sent)
        except Later as error:
            sent.reason, sent.is_away = str(error), True
        return sent

    def _link(self, sent: Sent, run_id: str | None) -> None:
        links = [one.trace_id for one in sent.left if one.link]
        if run_id is not None:
            for start in range(0, len(links), LINKS_PER_CALL):
                try:
                    self._api.link(links[start : start + LINKS_PER_CALL], run_id)
                except Refused as error:
                    logger.warning("traces are not linked to the run: %s", error)
        unlinked = [replace(one, link=False) for one in sent.left]
        sent.left = [one for one in unlinked if one.values]

    def _send(self, one: Assessment, sent: Sent) -> None:
        """Send its values; one that is taken or lost is left no more."""
        for name, value in one.values.items():
            try:
                self._api.assess(one.trace_id, _body(one.trace_id, name, value))
            except NotThere as error:
                if not self._is_given_up(one.trace_id):
                    sent.reason = "traces have not arrived that feedback belongs to"
                    return
                sent.lost, sent.reason = sent.lost + len(one.values), f"no such trace: {error}"
                break
            except Refused as error:
                sent.lost, sent.reason = sent.lost + 1, f"feedback {name} for trace {one.trace_id}: {error}"
        self._missing_since.pop(one.trace_id, None)
        sent.left.remove(one)

    def _is_given_up(self, trace_id: str) -> bool:
        now = time.monotonic()
        return now - self._missing_since.setdefault(trace_id, now) >= self._patience_s


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
