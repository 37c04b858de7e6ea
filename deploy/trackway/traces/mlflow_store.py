"""Traces in MLflow: a running server, or the database that a deployment left behind."""

import itertools
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, cast

from pydantic import JsonValue

from trackway.system.user_error import UserError
from trackway.traces.store import Steps, TraceFilter
from trackway.traces.tree import (
    SpanEvent,
    SpanLink,
    SpanNode,
    State,
    Status,
    TraceTree,
    assemble,
    hex_id,
    kind_of,
)
from trackway.tracing import attributes as names

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Span, Trace

_PAGE = 100
_IDS_PER_QUERY = 100
_LISTED_STEPS = 50
"""A range of at most so many steps is asked for by name: MLflow's filter for tags knows no < and >."""
_FOREIGN_TAGS = ("mlflow.", "service.", "telemetry.")
"""Prefixes of tags that say nothing about the trajectory: MLflow's own, and OpenTelemetry's resource."""


class MlflowStore:
    """The traces of some experiments."""

    def __init__(self, uri: str, experiments: Sequence[str]) -> None:
        """`experiments` by id."""
        self.uri = uri
        self._experiments = list(experiments)

    @classmethod
    def open(cls, uri: str, project: str | None) -> "MlflowStore":
        """The experiment of that name, or all. Raises UserError when there is none, or nothing answers."""
        return cls(uri, experiment_ids(uri, project))

    def search(self, wanted: TraceFilter) -> Iterator[TraceTree]:
        """See TraceStore; tags are filtered by MLflow, ranges here."""
        trees = (tree_of(trace) for trace in self.raw(filter_string(wanted)))
        return (tree for tree in trees if wanted.matches(tree))

    def get(self, trace_ids: Sequence[str]) -> dict[str, TraceTree]:
        """See TraceStore."""
        trees_by_id: dict[str, TraceTree] = {}
        for start in range(0, len(trace_ids), _IDS_PER_QUERY):
            ids = ", ".join(f"'tr-{trace_id}'" for trace_id in trace_ids[start : start + _IDS_PER_QUERY])
            trees = (tree_of(trace) for trace in self.raw(f"request_id IN ({ids})"))
            trees_by_id |= {tree.hex_id: tree for tree in trees}
        return trees_by_id

    def ids_with_prefix(self, prefix: str, limit: int) -> list[str]:
        """See TraceStore."""
        traces = self.raw(f"request_id LIKE 'tr-{prefix}%'", spans=False)
        return [hex_id(trace.info.trace_id) for trace in itertools.islice(traces, limit)]

    def raw(self, filter_string: str = "", spans: bool = True) -> Iterator["Trace"]:
        """MLflow's own objects, newest first, page by page."""
        token = None
        while True:
            with _answering(self.uri):
                page = _client(self.uri).search_traces(
                    locations=self._experiments,
                    filter_string=filter_string or None,
                    max_results=_PAGE,
                    page_token=token,
                    include_spans=spans,
                )
            yield from page
            token = page.token
            if not token:
                return


def filter_string(wanted: TraceFilter) -> str:
    """What MLflow can sort out of it: `tags.step IS NOT NULL AND tags.validate = 'False'`."""
    step = f"tags.{wanted.kind.step_tag}"
    return " AND ".join([_steps(step, wanted.steps), *(_tag(key, value) for key, value in wanted.tags.items())])


def _steps(tag: str, steps: Steps | None) -> str:
    if steps is None or steps.last is None or steps.last - steps.first >= _LISTED_STEPS:
        return f"{tag} IS NOT NULL"
    if steps.first == steps.last:
        return f"{tag} = '{steps.first}'"
    return f"{tag} RLIKE '^({'|'.join(str(step) for step in range(steps.first, steps.last + 1))})$'"


def _tag(key: str, value: str) -> str:
    if not re.fullmatch(r"[\w.-]+", key):
        raise UserError(f"--tag: expected a name of letters, digits, '_', '.' and '-', got {key!r}")
    if "'" in value and '"' in value:
        raise UserError(f"--tag {key}: MLflow cannot search for a text with both kinds of quotes, got {value!r}")
    quote = '"' if "'" in value else "'"
    if "*" in value:
        return f"tags.`{key}` LIKE {quote}{value.replace('*', '%')}{quote}"
    return f"tags.`{key}` = {quote}{value}{quote}"


def tree_of(trace: "Trace") -> TraceTree:
    """MLflow's trace in our own words."""
    info = trace.info
    start_ns = min((span.start_time_ns for span in trace.data.spans), default=info.request_time * 1_000_000)
    nodes = [_node(span, start_ns) for span in trace.data.spans]
    return TraceTree(
        trace_id=info.trace_id,
        name=info.tags.get("mlflow.traceName", ""),
        state=_state(str(getattr(info.state, "value", info.state))),
        tags={key: value for key, value in info.tags.items() if not key.startswith(_FOREIGN_TAGS)},
        started=datetime.fromtimestamp(start_ns / 1e9, UTC),
        duration_ms=info.execution_duration,
        feedback=_feedback(trace),
        roots=assemble(nodes),
    )


def _state(value: str) -> State:
    return "OK" if value == "OK" else "ERROR" if value == "ERROR" else "IN_PROGRESS"


def _feedback(trace: "Trace") -> dict[str, JsonValue]:
    from mlflow.entities import Feedback

    feedback = [
        assessment
        for assessment in trace.info.assessments or []
        if isinstance(assessment, Feedback) and assessment.valid is not False
    ]
    return _json(
        {
            assessment.name: assessment.value
            for assessment in sorted(feedback, key=lambda assessment: assessment.create_time_ms or 0)
        }
    )


def _json(values: Mapping[str, object]) -> dict[str, JsonValue]:
    return cast("dict[str, JsonValue]", dict(values))  # MLflow has read them from JSON


_REPEATED = (names.MLFLOW_INPUTS, names.MLFLOW_OUTPUTS, "mlflow.traceRequestId")
"""Attributes that the node says in fields of its own."""


def _node(span: "Span", start_ns: int) -> SpanNode:
    def ms(at_ns: int) -> float:
        return round((at_ns - start_ns) / 1e6, 3)

    code = str(getattr(span.status.status_code, "value", span.status.status_code))
    status: Status = "ERROR" if code == "ERROR" else "OK" if code == "OK" else "UNSET"
    return SpanNode(
        span_id=span.span_id,
        parent_id=span.parent_id,
        name=span.name,
        kind=kind_of(span.name),
        service=str(span.get_attribute(names.SERVICE) or ""),
        start_ms=ms(span.start_time_ns),
        end_ms=None if span.end_time_ns is None else ms(span.end_time_ns),
        status=status,
        error=span.status.description or "",
        inputs=span.inputs,
        outputs=span.outputs,
        attributes={key: value for key, value in span.attributes.items() if key not in _REPEATED},
        events=[
            SpanEvent(name=event.name, at_ms=ms(event.timestamp), attributes=_json(event.attributes))
            for event in span.events
        ],
        links=[SpanLink(trace_id=hex_id(link.trace_id), span_id=link.span_id) for link in span.links],
    )


def experiment_ids(mlflow_uri: str, project: str | None) -> list[str]:
    """Ids of the experiments to look in: the named one, else all. Raises UserError when there is none."""
    with _answering(mlflow_uri):
        experiments = list(_client(mlflow_uri).search_experiments())
    ids = [experiment.experiment_id for experiment in experiments if project in (None, experiment.name)]
    if not ids:
        known = ", ".join(experiment.name for experiment in experiments)
        raise UserError(f"no MLflow experiment {project!r}; there are {known}")
    return ids


def tag_filter(**tags: str | int | bool | None) -> str:
    """MLflow's filter for tags: `tags.step = '1' AND tags.validate = 'False'`; None leaves a tag out."""
    return " AND ".join(f"tags.{key} = '{value}'" for key, value in tags.items() if value is not None)


def search(mlflow_uri: str, experiments: Iterable[str], filter_string: str = "", limit: int = 100) -> list["Trace"]:
    """MLflow's own objects of the experiments (by id) that match, newest first, their spans included."""
    return list(itertools.islice(MlflowStore(mlflow_uri, list(experiments)).raw(filter_string), limit))


def _client(uri: str) -> "MlflowClient":
    # mlflow's defaults (7 tries, 120 s each) keep a person waiting; a user's own values are kept.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=uri)


@contextmanager
def _answering(uri: str) -> Iterator[None]:
    from mlflow.exceptions import MlflowException

    try:
        yield
    except MlflowException as error:
        first_line = (str(error).splitlines() or ["no reason given"])[0]
        raise UserError(f"MLflow at {uri} refused, or did not answer: {first_line[:300]}") from error
