"""Traces in MLflow, read over its REST API: a running server, or the database of an earlier deployment.

A local database without a server gets the shared one (tracing/local_mlflow). MLflow's own client takes four times the
CPU, most of it for its import. https://mlflow.org/docs/latest/api_reference/rest-api.html
"""

import base64
import itertools
import re
import weakref
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import httpx
import tenacity
from pydantic import JsonValue

from trackway.system.process import UserError
from trackway.traces.store import Steps, TraceFilter
from trackway.traces.tree import SpanEvent, SpanLink, SpanNode, State, Status, TraceTree, assemble, facts_of, hex_id
from trackway.tracing import attributes as names
from trackway.tracing.export.backends import condition, credentials, mlflow_http
from trackway.tracing.export.chat_markdown import unescaped
from trackway.tracing.local_mlflow import client as local_mlflow

TIMEOUT_S = 30.0
"""Timeout of one request. MLflow itself waits 20 s for a locked SQLite database."""
_ATTEMPTS = 3
_PAGE = 100
_SPANS_PER_QUERY = 50
"""Traces whose spans are asked for at once. Their ids are in the URL, which gunicorn limits to 4094 characters."""
_LISTED_STEPS = 50
"""Longest range of steps that is filtered as a list of values, since MLflow's tag filter has no < and >."""
_FOREIGN_TAGS = ("mlflow.", "service.", "telemetry.")
"""Prefixes of tags that do not describe the trajectory: MLflow's own, and OpenTelemetry's resource."""

Info = dict[str, Any]
"""MLflow's TraceInfo as JSON: id, times, state, tags, assessments."""
Span = dict[str, Any]
"""A span in OpenTelemetry's JSON, with ids in base64."""


class MlflowStore:
    """The traces of some experiments."""

    def __init__(self, uri: str, experiments: Sequence[str]) -> None:
        """`experiments` by id."""
        self._api = _Api(uri)
        self._experiments = list(experiments)

    @classmethod
    def open(cls, uri: str, project: str | None) -> "MlflowStore":
        """The experiment with this name, or all. Raises UserError if there is none, or MLflow does not answer."""
        return cls(uri, experiment_ids(uri, project))

    def search(self, wanted: TraceFilter) -> Iterator[TraceTree]:
        """See TraceStore. MLflow filters tags, and ranges are filtered here."""
        return (tree for tree in self.trees(filter_string(wanted)) if wanted.matches(tree))

    def get(self, trace_ids: Sequence[str]) -> dict[str, TraceTree]:
        """See TraceStore."""
        trees_by_id: dict[str, TraceTree] = {}
        for start in range(0, len(trace_ids), _PAGE):
            ids = ", ".join(f"'tr-{trace_id}'" for trace_id in trace_ids[start : start + _PAGE])
            trees_by_id |= {tree.hex_id: tree for tree in self.trees(f"request_id IN ({ids})")}
        return trees_by_id

    def ids_with_prefix(self, prefix: str, limit: int) -> list[str]:
        """See TraceStore."""
        infos = self._infos(f"request_id LIKE 'tr-{prefix}%'")
        return [hex_id(info["trace_id"]) for info in itertools.islice(infos, limit)]

    def trees(self, filter_string: str = "") -> Iterator[TraceTree]:
        """The traces that match MLflow's filter, newest first, loaded page by page on demand."""
        infos = self._infos(filter_string)
        while page := list(itertools.islice(infos, _SPANS_PER_QUERY)):
            spans = self._spans([info["trace_id"] for info in page])
            yield from (_tree(info, spans.get(info["trace_id"], [])) for info in page)

    def _infos(self, filter_string: str) -> Iterator[Info]:
        locations = [
            {"type": "MLFLOW_EXPERIMENT", "mlflow_experiment": {"experiment_id": experiment}}
            for experiment in self._experiments
        ]
        body: dict[str, JsonValue] = {"locations": [*locations], "max_results": _PAGE}
        return self._api.pages("3.0/mlflow/traces/search", body | _given(filter=filter_string), "traces")

    def _spans(self, trace_ids: Sequence[str]) -> dict[str, list[Span]]:
        traces = self._api.call("GET", "3.0/mlflow/traces/batchGet", params={"trace_ids": trace_ids}).get("traces", [])
        return {trace["trace_info"]["trace_id"]: trace.get("spans", []) for trace in traces}


class _Api:
    """Calls to the server of a tracking URI. For a local database a server is started if necessary."""

    def __init__(self, uri: str) -> None:
        self._uri = uri
        self._http = mlflow_http(uri, TIMEOUT_S)
        self._http.headers.update(credentials())
        weakref.finalize(self, self._http.close)

    def pages(self, path: str, body: Mapping[str, JsonValue], key: str) -> Iterator[dict[str, Any]]:
        """The entries of `key` in all pages, each page requested on demand."""
        token = ""
        while True:
            answer = self.call("POST", path, json=dict(body) | _given(page_token=token))
            yield from answer.get(key, [])
            token = answer.get("next_page_token", "")
            if not token:
                return

    def call(self, method: str, path: str, **content: Any) -> dict[str, Any]:
        """The JSON object in the answer. Raises UserError if MLflow refuses or does not answer."""
        try:
            server = local_mlflow.server_uri(self._uri)
        except (ValueError, OSError, local_mlflow.LocalMlflowError) as error:
            raise UserError(str(error)) from error
        try:
            answer = self._request(method, f"{server}/api/{path}", content)
            if answer.is_success:
                return answer.json()
            is_json = answer.headers.get("content-type", "").startswith("application/json")
            reason = answer.json().get("message", "") if is_json else f"HTTP {answer.status_code} {answer.text}"
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            reason = f"{error}" or type(error).__name__
        first_line = (reason.strip().splitlines() or ["no reason given"])[0]
        raise UserError(f"MLflow at {self._uri} refused, or did not answer: {first_line[:300]}")

    @tenacity.retry(
        retry=tenacity.retry_if_exception_type(httpx.TransportError),
        stop=tenacity.stop_after_attempt(_ATTEMPTS),
        wait=tenacity.wait_fixed(0.5),
        reraise=True,
    )
    def _request(self, method: str, url: str, content: Mapping[str, Any]) -> httpx.Response:
        return self._http.request(method, url, **content)


def _given(**fields: str) -> dict[str, JsonValue]:
    """The fields that are not empty."""
    return {key: value for key, value in fields.items() if value}


def filter_string(wanted: TraceFilter) -> str:
    """The part of the filter that MLflow supports: `tags.step IS NOT NULL AND tags.validate = 'False'`."""
    step = f"tags.{wanted.kind.step_tag}"
    tags = (_compared("--tag", f"tags.`{key}`", key, value) for key, value in wanted.tags.items())
    spans = [_compared("--span", "span.name", "name", wanted.span)] if wanted.span else []
    return " AND ".join([_steps(step, wanted.steps), *tags, *spans])


def _steps(tag: str, steps: Steps | None) -> str:
    if steps is None or steps.last is None or steps.last - steps.first >= _LISTED_STEPS:
        return f"{tag} IS NOT NULL"
    if steps.first == steps.last:
        return f"{tag} = '{steps.first}'"
    return f"{tag} RLIKE '^({'|'.join(str(step) for step in range(steps.first, steps.last + 1))})$'"


def _compared(option: str, field: str, key: str, value: str) -> str:
    if not re.fullmatch(r"[\w.-]+", key):
        raise UserError(f"{option}: expected a name of letters, digits, '_', '.' and '-', got {key!r}")
    try:
        return condition(field, value)
    except ValueError as error:
        raise UserError(f"{option} {key}: {error}") from error


def _tree(info: Info, spans: Sequence[Span]) -> TraceTree:
    """MLflow's trace as a TraceTree."""
    requested = datetime.fromisoformat(info["request_time"])
    start_ns = min((_ns(span, "start_time_unix_nano") for span in spans), default=int(requested.timestamp() * 1e9))
    tags = info.get("tags", {})
    duration = info.get("execution_duration")
    return TraceTree(
        trace_id=info["trace_id"],
        name=tags.get("mlflow.traceName", ""),
        state=_state(info.get("state", "")),
        tags={key: tags[key] for key in sorted(tags) if not key.startswith(_FOREIGN_TAGS)},
        started=datetime.fromtimestamp(start_ns / 1e9, UTC),
        duration_ms=None if duration is None else round(float(duration.removesuffix("s")) * 1e3),
        feedback=_feedback(info.get("assessments", [])),
        roots=assemble(_node(span, start_ns) for span in spans),
    )


def _state(value: str) -> State:
    return "OK" if value == "OK" else "ERROR" if value == "ERROR" else "IN_PROGRESS"


def _feedback(assessments: Sequence[Mapping[str, Any]]) -> dict[str, JsonValue]:
    valid = [assessment for assessment in assessments if "feedback" in assessment and assessment.get("valid", True)]
    ordered = sorted(valid, key=lambda assessment: datetime.fromisoformat(assessment["create_time"]))
    return {assessment["assessment_name"]: assessment["feedback"].get("value") for assessment in ordered}


def _node(span: Span, start_ns: int) -> SpanNode:
    def ms(time: Mapping[str, Any], key: str) -> float:
        return round((_ns(time, key) - start_ns) / 1e6, 3)

    code = span.get("status", {}).get("code", "")
    status: Status = "ERROR" if code == "STATUS_CODE_ERROR" else "OK" if code == "STATUS_CODE_OK" else "UNSET"
    attributes = _attributes(span)
    attributes.pop("mlflow.traceRequestId", None)
    facts = facts_of(span["name"], attributes)
    if facts["service"] and attributes.get(names.MLFLOW_SPAN_TYPE) == "AGENT":
        facts |= {key: _unescaped(facts[key]) for key in ("inputs", "outputs")}
    return SpanNode(
        span_id=_hex(span["span_id"]),
        parent_id=_hex(span["parent_span_id"]) if span.get("parent_span_id") else None,
        name=span["name"],
        start_ms=ms(span, "start_time_unix_nano"),
        end_ms=ms(span, "end_time_unix_nano") if span.get("end_time_unix_nano") else None,
        status=status,
        error=span.get("status", {}).get("message", ""),
        **facts,
        events=[
            SpanEvent(name=event["name"], at_ms=ms(event, "time_unix_nano"), attributes=_attributes(event))
            for event in span.get("events", [])
        ],
        links=[
            SpanLink(trace_id=_hex(link["trace_id"]), span_id=_hex(link["span_id"])) for link in span.get("links", [])
        ],
    )


def _unescaped(value: JsonValue) -> JsonValue:
    """Return the inputs or outputs of a trajectory as they were before MLflow's exporter."""
    messages = value.get("messages") if isinstance(value, dict) else None
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, dict) and isinstance(content := message.get("content"), str):
            message["content"] = unescaped(content)
    return value


def _ns(time: Mapping[str, Any], key: str) -> int:
    return int(time[key])  # a number, or text as in protobuf's JSON


def _hex(id_base64: str) -> str:
    return base64.b64decode(id_base64).hex()


def _attributes(owner: Mapping[str, Any]) -> dict[str, JsonValue]:
    return {pair["key"]: _value(pair.get("value", {})) for pair in owner.get("attributes", [])}


def _value(typed: Mapping[str, Any]) -> JsonValue:
    """OpenTelemetry's AnyValue, an object whose only key names the value's type."""
    for kind, value in typed.items():
        match kind:
            case "array_value":
                return [_value(item) for item in value.get("values", [])]
            case "kvlist_value":
                return {pair["key"]: _value(pair.get("value", {})) for pair in value.get("values", [])}
            case "int_value":
                return int(value)
            case "double_value":
                return float(value)
            case _:
                return value
    return None


def experiment_ids(mlflow_uri: str, project: str | None) -> list[str]:
    """Ids of the named experiment, or of all. Raises UserError if there is none."""
    experiments = list(_Api(mlflow_uri).pages("2.0/mlflow/experiments/search", {"max_results": 1000}, "experiments"))
    ids = [str(experiment["experiment_id"]) for experiment in experiments if project in (None, experiment["name"])]
    if not ids:
        known = ", ".join(experiment["name"] for experiment in experiments)
        raise UserError(f"no MLflow experiment {project!r}; there are {known}")
    return ids
