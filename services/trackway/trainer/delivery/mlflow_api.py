"""The part of MLflow's REST API that a run uses, over one kept connection. MLflow's client uses three times the CPU.

https://mlflow.org/docs/latest/api_reference/rest-api.html
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import httpx
from pydantic import JsonValue

from trackway.tracing.export.backends import DeletedExperiment, credentials, experiment_id, mlflow_http
from trackway.tracing.local_mlflow import client as local_mlflow
from trackway.trainer.delivery.jobs import Later, Refused
from trackway.wire.base import named_number

TIMEOUT_S = 120.0
"""Long, because an MLflow that gets little of a busy machine must not be sent the same again."""
CREATE_TIMEOUT_S = 120.0
"""Timeout for creating a run. Longer, because a retry after a timed-out but completed request creates a second run."""
LINK_ATTEMPTS = 3
ASSESSMENTS = "/api/3.0/trackway/assessments"
"""Route of the server of a local database (local_mlflow/server_process.py)."""
UID_TAG = "trackway.run_uid"
"""Tag of an MLflow run with the uid of its Trackway run."""


class NotThere(Refused):
    """MLflow has no such run or trace."""


class StoredRun(NamedTuple):
    """A run's status in MLflow."""

    status: str
    """RUNNING, FINISHED, FAILED or KILLED."""
    is_deleted: bool


class Metric(NamedTuple):
    """One value of a metric. MLflow stores a value with the same four fields only once."""

    name: str
    value: float
    timestamp: int
    """Milliseconds since 1970."""
    step: int


class MlflowApi:
    """Calls to the server of a tracking URI. For a local database a server is started if necessary.

    Every method raises Later when a retry may succeed, NotThere, or Refused.
    """

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self._http = mlflow_http(uri, TIMEOUT_S)
        self._http.headers.update(credentials())

    def experiment(self, name: str) -> str:
        """MLflow's id of the experiment of that name, created if it does not exist."""
        try:
            return experiment_id(self._ask, name)
        except DeletedExperiment as error:
            raise Later(f"the MLflow experiment is deleted: {error}") from error
        except httpx.HTTPStatusError as error:
            raise _failure(error.response) or Later(str(error)) from error

    def run(self, run_id: str) -> StoredRun:
        """The run's status in MLflow."""
        info = self._call("GET", "runs/get", params={"run_id": run_id}).json()["run"]["info"]
        return StoredRun(info["status"], info["lifecycle_stage"] == "deleted")

    def runs_of(self, experiment: str, uid: str) -> list[str]:
        """MLflow's ids of the runs tagged with `uid`, sorted; normally at most one."""
        body = {"experiment_ids": [experiment], "filter": f"tags.`{UID_TAG}` = '{uid}'", "max_results": 100}
        runs = self._call("POST", "runs/search", json=body).json().get("runs", [])
        return sorted(str(run["info"]["run_id"]) for run in runs)

    def create_run(self, experiment: str, name: str, uid: str, start_time: int) -> str:
        """A new run, whose id is returned."""
        tags = [{"key": UID_TAG, "value": uid}]
        body = {"experiment_id": experiment, "run_name": name, "start_time": start_time, "tags": tags}
        answer = self._call("POST", "runs/create", json=body, timeout=CREATE_TIMEOUT_S)
        return str(answer.json()["run"]["info"]["run_id"])

    def update_run(self, run_id: str, status: str, end_time: int | None) -> None:
        """Set the run's status; `end_time` in milliseconds since 1970."""
        body: dict[str, JsonValue] = {"run_id": run_id, "status": status}
        self._call("POST", "runs/update", json=body | ({} if end_time is None else {"end_time": end_time}))

    def log_params(self, run_id: str, params: Mapping[str, str]) -> None:
        """Record up to 100 params."""
        self._call("POST", "runs/log-batch", json={"run_id": run_id, "params": _pairs(params)})

    def set_tags(self, run_id: str, tags: Mapping[str, str]) -> None:
        """Set up to 100 tags of the run. A tag of the same name is replaced."""
        self._call("POST", "runs/log-batch", json={"run_id": run_id, "tags": _pairs(tags)})

    def log_metrics(self, run_id: str, metrics: Sequence[Metric]) -> None:
        """Record up to 1000 metrics."""
        values = [
            {
                "key": metric.name,
                "value": named_number(metric.value),
                "timestamp": metric.timestamp,
                "step": metric.step,
            }
            for metric in metrics
        ]
        self._call("POST", "runs/log-batch", json={"run_id": run_id, "metrics": values})

    def link(self, trace_ids: Sequence[str], run_id: str) -> None:
        """Link up to 100 traces (32 hex digits) to the run. They may arrive later.

        MLflow links the traces that it receives as well. Where it links one at the same moment, it refuses the call and
        writes nothing. Repeated, the call links the others.
        """
        body = {"trace_ids": [f"tr-{trace_id}" for trace_id in trace_ids], "run_id": run_id}
        for _ in range(LINK_ATTEMPTS):
            answer = self._ask("POST", "traces/link-to-run", json=body)
            if answer.status_code != 400 or "entity_associations" not in answer.text:
                _raise_failure(answer)
                return
        raise Later("MLflow links the same traces to the run at present")

    def assess(self, trace_id: str, assessment: Mapping[str, JsonValue]) -> None:
        """Record an assessment of a trace. NotThere while the trace has not arrived."""
        path = f"/api/3.0/mlflow/traces/tr-{trace_id}/assessments"
        answer = self._send("POST", path, json={"assessment": dict(assessment)})
        # MLflow's answer to an assessment whose id already exists.
        if answer.status_code == 500 and "constraint violation" in answer.text:
            return
        _raise_failure(answer)

    def assess_together(self, assessments: Sequence[Mapping[str, JsonValue]]) -> set[str] | None:
        """Record assessments in one request. The ids (32 hex digits) of traces that have not arrived.

        None when the server takes one value per request, as any but that of a local database does.
        """
        answer = self._send("POST", ASSESSMENTS, json={"assessments": [dict(assessment) for assessment in assessments]})
        if answer.status_code in (404, 405, 501) or isinstance(_failure(answer), Refused):
            return None
        _raise_failure(answer)
        return {str(trace_id).removeprefix("tr-") for trace_id in answer.json()["missing"]}

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def _call(self, method: str, call: str, **content: object) -> httpx.Response:
        answer = self._ask(method, call, **content)
        _raise_failure(answer)
        return answer

    def _ask(self, method: str, call: str, **content: object) -> httpx.Response:
        return self._send(method, f"/api/2.0/mlflow/{call}", **content)

    def _send(self, method: str, path: str, **content: object) -> httpx.Response:
        try:
            url = f"{local_mlflow.server_uri(self.uri)}{path}"
        except (ValueError, OSError, local_mlflow.LocalMlflowError) as error:
            raise Later(f"MLflow at {self.uri}: {error}") from error
        try:
            return self._http.request(method, url, **content)  # pyright: ignore[reportArgumentType]
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.UnsupportedProtocol) as error:
            raise Later(f"MLflow at {self.uri} cannot be reached: {error or type(error).__name__}") from error
        except httpx.TransportError as error:
            reason = f"MLflow at {self.uri} does not answer: {type(error).__name__} {error}"
            raise Later(reason.rstrip()) from error


def _raise_failure(answer: httpx.Response) -> None:
    failure = _failure(answer)
    if failure is not None:
        raise failure


def _failure(answer: httpx.Response) -> Later | Refused | None:
    """The exception for an answer, None for success. A rejected login is Later: the credentials may be corrected."""
    if answer.is_success:
        return None
    reason = f"MLflow answered HTTP {answer.status_code}: {answer.text[:200]}"
    if answer.status_code == 404 and "RESOURCE_DOES_NOT_EXIST" in answer.text:
        return NotThere(reason)
    # Any other 404 comes from a proxy in front of MLflow.
    if answer.status_code in (401, 403, 404, 408, 429) or answer.status_code >= 500:
        return Later(reason)
    return Refused(reason)


def _pairs(values: Mapping[str, str]) -> list[JsonValue]:
    return [{"key": key, "value": value} for key, value in values.items()]
