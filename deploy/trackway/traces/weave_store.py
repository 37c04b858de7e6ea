"""Traces in W&B Weave, read through weave's own client. A call keeps its whole span as `attributes["otel_span"]`."""

import contextlib
import itertools
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, cast

from pydantic import JsonValue

from trackway.system.process import UserError
from trackway.traces.store import Steps, TraceFilter
from trackway.traces.tree import SpanEvent, SpanLink, SpanNode, State, TraceTree, assemble, facts_of, hex_id
from trackway.traces.views import field_of, number
from trackway.tracing import attributes as names

if TYPE_CHECKING:
    from weave.trace.weave_client import WeaveClient

_TRACES_PER_QUERY = 50
_NEWEST_FIRST = [{"field": "started_at", "direction": "desc"}]

Span = dict[str, Any]
"""A span in Weave: OpenTelemetry's fields, with attribute names split into nested objects at their dots."""


class WeaveStore:
    """The traces of one project."""

    def __init__(self, client: "WeaveClient") -> None:
        self._client = client

    @classmethod
    def open(cls, project: str) -> "WeaveStore":
        """`entity/project`, with the key of WANDB_API_KEY or of `wandb login`.

        Raises:
            UserError: Weave refused or did not answer.
        """
        import weave

        # weave prints a greeting to standard output, which belongs to the command.
        with _answering(), contextlib.redirect_stdout(sys.stderr):
            return cls(weave.init(project))

    def search(self, wanted: TraceFilter) -> Iterator[TraceTree]:
        """See TraceStore. Weave filters tags and ranges of steps, and patterns and rewards are filtered here."""
        roots = self._calls(query=query_of(wanted), filter={"trace_roots_only": True}, sort_by=_NEWEST_FIRST)
        ids = (str(call.trace_id) for call in roots)
        while page := list(itertools.islice(ids, _TRACES_PER_QUERY)):
            trees = self.get(page)
            yield from (tree for trace_id in page if (tree := trees.get(trace_id)) and wanted.matches(tree))

    def get(self, trace_ids: Sequence[str]) -> dict[str, TraceTree]:
        """See TraceStore."""
        trees: dict[str, TraceTree] = {}
        for start in range(0, len(trace_ids), _TRACES_PER_QUERY):
            page = list(trace_ids[start : start + _TRACES_PER_QUERY])
            trees |= trees_of(self._calls(filter={"trace_ids": page}))
        return trees

    def ids_with_prefix(self, prefix: str, limit: int) -> list[str]:
        """See TraceStore."""
        contains = {"$contains": {"input": {"$getField": "trace_id"}, "substr": {"$literal": prefix}}}
        calls = self._calls(query={"$expr": contains}, filter={"trace_roots_only": True})
        ids = (str(call.trace_id) for call in calls)
        return list(itertools.islice((trace_id for trace_id in ids if trace_id.startswith(prefix)), limit))

    def _calls(self, **arguments: Any) -> Iterator[Any]:
        with _answering():
            yield from self._client.get_calls(include_feedback=True, **arguments)


def query_of(wanted: TraceFilter) -> dict[str, Any] | None:
    """The part of a filter that Weave supports. Tags keep their types, so `7` is searched as text and number."""
    exact = {key: value for key, value in wanted.tags.items() if "*" not in value}
    terms = [_any_of(f"attributes.{key}", value) for key, value in exact.items()]
    terms += _within(f"attributes.{wanted.kind.step_tag}", wanted.steps)
    return {"$expr": {"$and": terms}} if terms else None


def _any_of(name: str, value: str) -> dict[str, Any]:
    literals: list[str | int | bool] = [value]
    literals += [int(value)] if re.fullmatch(r"-?[0-9]+", value) else []
    literals += [value == "True"] if value in ("True", "False") else []
    equal = [{"$eq": [{"$getField": name}, {"$literal": literal}]} for literal in literals]
    return equal[0] if len(equal) == 1 else {"$or": equal}


def _within(name: str, steps: Steps | None) -> list[dict[str, Any]]:
    if steps is None:
        return []
    step = {"$convert": {"input": {"$getField": name}, "to": "int"}}  # sqlite compares text otherwise
    terms: list[dict[str, Any]] = [{"$gte": [step, {"$literal": steps.first}]}]
    if steps.last is not None:
        terms.append({"$not": [{"$gt": [step, {"$literal": steps.last}]}]})
    return terms


def trees_of(calls: Iterable[Any]) -> dict[str, TraceTree]:
    """The traces of these calls, by id. Calls that are not OpenTelemetry spans are skipped."""
    spans: dict[str, list[Span]] = defaultdict(list)
    feedback: dict[str, dict[str, JsonValue]] = defaultdict(dict)
    for call in calls:
        span = (call.attributes or {}).get("otel_span")
        if span:
            spans[str(call.trace_id)].append(json.loads(json.dumps(span, default=str)))
            feedback[str(call.trace_id)] |= _feedback(call)
    return {trace_id: _tree(trace_id, every, feedback[trace_id]) for trace_id, every in spans.items()}


def _feedback(call: Any) -> dict[str, JsonValue]:
    entries = ((call.summary or {}).get("weave") or {}).get("feedback") or []
    ordered = sorted(entries, key=lambda entry: str(entry.get("created_at")))
    return {str(entry["feedback_type"]): field_of(dict(entry["payload"]), "value") for entry in ordered}


def _tree(trace_id: str, spans: Sequence[Span], feedback: dict[str, JsonValue]) -> TraceTree:
    start = min(_when(span["start_time"]) for span in spans)
    roots = assemble(_node(span, start) for span in spans)
    root = next((span for span in roots if span.parent_id is None), None)
    tags = {key: str(value) for key, value in _below(root, names.WEAVE_ATTRIBUTE).items()}
    state: State = "IN_PROGRESS"
    if root is not None and root.end_ms is not None:
        state = "ERROR" if root.status == "ERROR" else "OK"
    return TraceTree(
        trace_id=trace_id,
        name=str(root.attributes.get(names.WEAVE_DISPLAY_NAME, root.name)) if root else "",
        state=state,
        tags=tags,
        started=start,
        duration_ms=root.duration_ms if root else None,
        feedback=feedback,
        roots=roots,
    )


def _below(root: SpanNode | None, prefix: str) -> dict[str, JsonValue]:
    attributes = root.attributes if root else {}
    return {key.removeprefix(prefix): value for key, value in attributes.items() if key.startswith(prefix)}


def _node(span: Span, start: datetime) -> SpanNode:
    attributes = _flat(span.get("attributes") or {}, keep=(names.MLFLOW_INPUTS, names.MLFLOW_OUTPUTS))
    code = str((span.get("status") or {}).get("code"))
    end = span.get("end_time")
    return SpanNode(
        span_id=span["context"]["span_id"],
        parent_id=span.get("parent_id"),
        name=span["name"],
        start_ms=_ms(_when(span["start_time"]), start),
        end_ms=_ms(_when(end), start) if end else None,
        status="ERROR" if code == "ERROR" else "OK" if code == "OK" else "UNSET",
        error=str((span.get("status") or {}).get("message") or ""),
        **facts_of(span["name"], attributes),
        events=[_event(event, start) for event in span.get("events") or []],
        links=[
            SpanLink(trace_id=hex_id(str(link["trace_id"])), span_id=str(link["span_id"]))
            for link in span.get("links") or []
        ],
    )


def _event(event: Mapping[str, Any], start: datetime) -> SpanEvent:
    at_ns = number(event.get("timestamp")) or 0.0
    at_ms = round(at_ns / 1e6 - start.timestamp() * 1e3, 3)
    return SpanEvent(name=event["name"], at_ms=at_ms, attributes=_flat(event.get("attributes") or {}))


def _flat(nested: Mapping[str, Any], keep: tuple[str, ...] = (), prefix: str = "") -> dict[str, JsonValue]:
    """Attributes with dotted names restored. The values of `keep` stay nested."""
    flat: dict[str, JsonValue] = {}
    for key, value in nested.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and name not in keep:
            flat |= _flat(value, keep, f"{name}.")
        else:
            flat[name] = cast("JsonValue", value)
    return flat


def _when(text: str) -> datetime:
    """A time in UTC. Weave's times have no time zone."""
    moment = datetime.fromisoformat(text)
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def _ms(moment: datetime, start: datetime) -> float:
    return round((moment - start).total_seconds() * 1e3, 3)


@contextlib.contextmanager
def _answering() -> Iterator[None]:
    """Turn weave's errors into UserError. Except for HTTP and login, they have no common class."""
    try:
        yield
    except Exception as error:
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"Weave refused, or did not answer: {first_line[:300]}; is WANDB_API_KEY set?") from error
