"""The spans of a trajectory: root, turn, chat, tool, reward. Attributes follow one table for MLflow and Weave."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.context import Context, attach, detach, get_current
from opentelemetry.trace import Link, NonRecordingSpan, Span, SpanContext, Status, StatusCode, TraceFlags
from pydantic import BaseModel

from trackway.tracing import attributes as names
from trackway.tracing.attributes import SpanKind
from trackway.tracing.context import max_text_bytes, tracer, with_experiment
from trackway.wire.chat import Message
from trackway.wire.errors import TrackwayError
from trackway.wire.rollout import SamplingParams
from trackway.wire.trajectory import Tags, WeightSpan

Scalar = str | int | float | bool

_UNSAMPLED = NonRecordingSpan(SpanContext(trace_id=1, span_id=1, is_remote=False, trace_flags=TraceFlags(0)))


class SpanHandle:
    """A span in our own words; every method is free when the span does not record."""

    def __init__(self, span: Span) -> None:
        self._span = span
        trace_id = format(span.get_span_context().trace_id, "032x")
        self.trace_id: str | None = trace_id if span.is_recording() else None
        """32 hex digits, None when the trace is not recorded."""

    @property
    def recording(self) -> bool:
        """Whether anything set here is kept: decode text only then."""
        return self._span.is_recording()

    def set(self, key: str, value: Scalar) -> None:
        """One attribute, as it is."""
        self._span.set_attribute(key, value)

    def inputs(self, value: object) -> None:
        """What went in, as capped JSON; both backends read it."""
        self._set_json(names.MLFLOW_INPUTS, value)

    def outputs(self, value: object) -> None:
        """What came out, as capped JSON; both backends read it."""
        self._set_json(names.MLFLOW_OUTPUTS, value)

    def _set_json(self, key: str, value: object) -> None:
        if self.recording:
            self._span.set_attribute(key, _json(value, max_text_bytes()))

    def usage(self, prompt_tokens: int, completion_tokens: int) -> None:
        """Token counts in the GenAI names; MLflow sums them over the tree."""
        self._span.set_attribute(names.INPUT_TOKENS, prompt_tokens)
        self._span.set_attribute(names.OUTPUT_TOKENS, completion_tokens)

    def finish_reasons(self, reasons: Sequence[str]) -> None:
        """Why generation ended."""
        self._span.set_attribute(names.FINISH_REASONS, list(reasons))

    def weight_versions(self, spans: Sequence[WeightSpan]) -> None:
        """The version that generated the text, or `3,4` when weights changed on the way."""
        versions = ",".join(str(span.version) for span in spans)
        self._span.set_attribute(names.WEIGHT_VERSION, versions)
        self._span.set_attribute(names.WEAVE_ATTRIBUTE + "weight_version", versions)

    def score(self, value: float) -> None:
        """The score of an evaluation."""
        self._span.set_attribute(names.EVALUATION_SCORE, value)

    def error(self, message: str, code: str) -> None:
        """Mark the span failed."""
        self._span.set_status(Status(StatusCode.ERROR, message))
        self._span.set_attribute(names.ERROR_CODE, code)

    def event(self, name: str, **attributes: Scalar) -> None:
        """Something that happened on the way."""
        self._span.add_event(name, attributes)


@contextmanager
def trajectory_span(
    tags: Tags,
    trajectory_id: str,
    session_id: str,
    agent_name: str,
    messages: Sequence[Message],
    record: bool,
    experiment_id: str | None = None,
    wandb_run_id: str | None = None,
) -> Iterator[SpanHandle]:
    """The root of a trajectory's trace, linked to the caller's span instead of being its child.

    MLflow takes name, tags, state and previews from the span without a parent: so the root must be a true one.
    With `record` False nothing below it is recorded either, in any process.
    """
    if not record:
        with _entered(_UNSAMPLED, Context()) as handle:
            yield handle
        return
    caller = trace.get_current_span().get_span_context()
    parent = with_experiment(Context(), experiment_id)
    span = tracer().start_span(
        "trajectory",
        context=parent,
        links=[Link(caller)] if caller.is_valid else [],
        attributes={
            **SpanKind.TRAJECTORY.attributes,
            **names.tag_attributes(tags),
            **_run_attributes(wandb_run_id, tags.step),
            names.TRAJECTORY_ID: trajectory_id,
            names.SESSION_ID: names.group_id(tags),
            names.CONVERSATION_ID: session_id,
            names.AGENT_NAME: agent_name,
            names.MLFLOW_TRACE_NAME: names.display_name(tags),
            names.WEAVE_DISPLAY_NAME: names.display_name(tags),
        },
    )
    with _entered(span, parent) as handle:
        handle.inputs({"messages": messages})
        yield handle


def _run_attributes(wandb_run_id: str | None, step: int) -> dict[str, str | int]:
    return {} if wandb_run_id is None else {names.WANDB_RUN_ID: wandb_run_id, names.WANDB_RUN_STEP: step}


@contextmanager
def turn_span(index: int) -> Iterator[SpanHandle]:
    """One assistant turn: its generation and its tool calls."""
    with _child(f"turn {index}", SpanKind.TURN, {names.TURN_INDEX: index}) as handle:
        yield handle


@contextmanager
def chat_span(model: str, params: SamplingParams) -> Iterator[SpanHandle]:
    """One generation by the rollout engine."""
    attributes: dict[str, Scalar] = {
        names.MODEL: model,
        names.PROVIDER: "trackway",
        names.TEMPERATURE: params.temperature,
        names.MAX_TOKENS: params.max_tokens,
    }
    with _child(f"chat {model}", SpanKind.CHAT, attributes) as handle:
        yield handle


@contextmanager
def tool_span(name: str, arguments: Mapping[str, object], call_id: str | None) -> Iterator[SpanHandle]:
    """One execution of a tool, with its arguments."""
    attributes: dict[str, Scalar] = {names.TOOL_NAME: name}
    if call_id is not None:
        attributes[names.TOOL_CALL_ID] = call_id
    with _child(f"execute_tool {name}", SpanKind.TOOL, attributes) as handle:
        handle.inputs(dict(arguments))
        yield handle


@contextmanager
def reward_span(name: str) -> Iterator[SpanHandle]:
    """One scoring by the reward service."""
    with _child("reward", SpanKind.REWARD, {names.EVALUATION_NAME: name}) as handle:
        yield handle


@contextmanager
def operation_span(name: str) -> Iterator[SpanHandle]:
    """One traced function of a user's own agent loop."""
    with _child(name, SpanKind.OPERATION, {}) as handle:
        yield handle


def add_event(name: str, **attributes: Scalar) -> None:
    """Something that happened on the way (a retry, a lost instance), on the current span."""
    trace.get_current_span().add_event(name, attributes)


def set_outcome(span: SpanHandle, outcome: str) -> None:
    """Tag the trace with how the trajectory ended; call it on the root."""
    span.set(names.MLFLOW_TAG + "outcome", outcome)
    span.set(names.WEAVE_ATTRIBUTE + "outcome", outcome)


@contextmanager
def _child(name: str, kind: SpanKind, attributes: Mapping[str, Scalar]) -> Iterator[SpanHandle]:
    span = tracer().start_span(name, attributes={**kind.attributes, **attributes})
    with _entered(span, get_current()) as handle:
        yield handle


@contextmanager
def _entered(span: Span, parent: Context) -> Iterator[SpanHandle]:
    """Make the span current, mark it ERROR when an exception passes, end it."""
    handle = SpanHandle(span)
    token = attach(trace.set_span_in_context(span, parent))
    try:
        yield handle
    except BaseException as error:
        code = error.code.value if isinstance(error, TrackwayError) else type(error).__name__
        handle.error(str(error) or type(error).__name__, code)
        if isinstance(error, Exception):
            span.record_exception(error)
        raise
    finally:
        detach(token)
        span.end()


def _json(value: object, max_bytes: int) -> str:
    """JSON of `value`; when it is too long its texts are cut, so that keys and numbers stay readable."""
    text = json.dumps(value, default=_plain, ensure_ascii=False)
    if len(text.encode()) <= max_bytes:
        return text
    plain = json.loads(text)
    fair_share = max(64, max_bytes // max(1, _count_texts(plain)))
    cut = json.dumps(_cut_texts(plain, fair_share), ensure_ascii=False)
    return cut if len(cut.encode()) <= 2 * max_bytes else json.dumps(truncate(cut, max_bytes), ensure_ascii=False)


def _count_texts(value: object) -> int:
    if isinstance(value, dict | list):
        return sum(map(_count_texts, value.values() if isinstance(value, dict) else value))
    return int(isinstance(value, str))


def _cut_texts(value: object, max_bytes: int) -> object:
    if isinstance(value, dict):
        return {key: _cut_texts(item, max_bytes) for key, item in value.items()}
    if isinstance(value, list):
        return [_cut_texts(item, max_bytes) for item in value]
    return truncate(value, max_bytes) if isinstance(value, str) else value


def truncate(text: str, max_bytes: int) -> str:
    """`text` cut to about `max_bytes` of UTF-8, with the marker `[truncated N bytes]`."""
    data = text.encode()
    if len(data) <= max_bytes:
        return text
    kept = data[:max_bytes].decode(errors="ignore")
    return f"{kept}[truncated {len(data) - len(kept.encode())} bytes]"


def _plain(value: object) -> object:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", exclude_none=True)
    return repr(value)
