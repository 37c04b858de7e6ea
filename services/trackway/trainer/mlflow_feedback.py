"""Feedback as assessments of MLflow traces, over MLflow's own HTTP route on one kept connection.

mlflow's client needs three times the CPU for it. There is no route for several values, and parts of one value cannot be
searched by, so each value is a request: `feedback.fate = 'used'` and `feedback.reward > 0.5` find their traces.
"""

import uuid
from collections.abc import Sequence
from datetime import UTC, datetime

import httpx
from pydantic import JsonValue

from trackway.tracing import local_mlflow
from trackway.tracing.mlflow_endpoint import credentials
from trackway.trainer.background import Background, NotYet
from trackway.trainer.feedback import Assessment, Value

TIMEOUT_S = 10.0
_STORED = "constraint violation"
"""MLflow's answer, with status 500, to an assessment whose id it has already."""


class MlflowFeedback:
    """A value that may not have arrived is sent again: its id says that it is the same."""

    def __init__(self, uri: str, background: Background, patience_s: float) -> None:
        self._uri = uri
        self._background = background
        self._patience_s = patience_s
        self._http = httpx.Client(timeout=TIMEOUT_S, headers=credentials())

    def submit(self, assessments: Sequence[Assessment]) -> None:
        """Queue one job per trace, which waits for that trace."""
        for one in assessments:
            self._background.submit(lambda one=one: self._send_all(one), self._patience_s)

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def _send_all(self, one: Assessment) -> None:
        for name, value in one.values.items():
            self._send(one.trace_id, name, value)

    def _send(self, trace_id: str, name: str, value: Value) -> None:
        url = f"{local_mlflow.server_uri(self._uri)}/api/3.0/mlflow/traces/tr-{trace_id}/assessments"
        try:
            answer = self._http.post(url, json=_body(trace_id, name, value))
        except httpx.TransportError as error:
            raise NotYet(f"{self._uri} does not answer: {error}") from error
        if answer.is_success or (answer.status_code == 500 and _STORED in answer.text):
            return
        reason = f"feedback {name} for trace {trace_id}: HTTP {answer.status_code}: {answer.text[:200]}"
        if answer.status_code in (404, 408, 429) or answer.status_code >= 500:  # 404: the trace has not arrived
            raise NotYet(reason)
        raise RuntimeError(reason)


def _body(trace_id: str, name: str, value: Value) -> dict[str, JsonValue]:
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    assessment: dict[str, JsonValue] = {
        "assessment_id": f"a-{uuid.uuid5(uuid.NAMESPACE_OID, f'{trace_id}/{name}').hex}",
        "assessment_name": name,
        "trace_id": f"tr-{trace_id}",
        "source": {"source_type": "CODE", "source_id": "trackway.trainer"},
        "create_time": now,
        "last_update_time": now,
        "feedback": {"value": value},
    }
    return {"assessment": assessment}
