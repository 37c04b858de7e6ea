"""The spans of a trajectory: root, turn, chat, tool, reward."""

import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

from opentelemetry import trace
from opentelemetry.context import Context, attach, detach, get_current
from opentelemetry.trace import Link, NonRecordingSpan, Span, SpanContext, TraceFlags

from trackway.tracing import attributes as names
from trackway.tracing.attributes import SpanKind
from trackway.tracing.context import carrying, collect_trace_stats, current_target, kept_root
from trackway.tracing.span_handle import Scalar, SpanHandle, active_tracing, tracer
from trackway.wire.chat import Message
from trackway.wire.errors import TrackwayError
from trackway.wire.rollout import SamplingParams
from trackway.wire.trajectory import Tags, TraceTarget

_UNSAMPLED = NonRecordingSpan(SpanContext(trace_id=1, span_id=1, is_remote=False, trace_flags=TraceFlags(0)))


@contextmanager
def trajectory_span(
    tags: Tags,
    trajectory_id: str,
    agent_name: str,
    messages: Sequence[Message],
    record: bool | None,
    target: TraceTarget | None = None,
) -> Iterator[SpanHandle]:
    """The root of a trajectory's trace, linked to the caller's span instead of being its child.

    The span has no parent, because MLflow takes name, tags, state and previews from such a span. With `record` False,
    nothing below it is recorded in any process. With None, the trajectory continues the caller's trace if that is
    recorded, and is not recorded otherwise.
    """
    attributes: dict[str, Scalar] = {
        names.TRAJECTORY_ID: trajectory_id,
        names.GROUP: names.group_id(tags),
        names.AGENT_NAME: agent_name,
        names.TITLE: names.display_name(tags),
    }
    with root_span("trajectory", tags.model_dump(), attributes, record, target) as handle:
        handle.inputs({"messages": messages})
        yield handle


@contextmanager
def root_span(
    name: str,
    tags: Mapping[str, names.Tag],
    attributes: Mapping[str, Scalar],
    record: bool | None,
    target: TraceTarget | None = None,
    kind: SpanKind = SpanKind.TRAJECTORY,
) -> Iterator[SpanHandle]:
    """A span with tags that begins a trace and collects trace stats. For `record`, see `trajectory_span`."""
    with collect_trace_stats() as sums:
        caller = trace.get_current_span().get_span_context()
        continues = record is None and caller.is_valid and caller.trace_flags.sampled
        if not (record or continues):
            with EnteredSpan(_UNSAMPLED, Context()) as handle:
                handle.trace_stats = sums
                yield handle
            return
        parent = carrying(attributes, get_current() if continues else kept_root(target))
        linked = caller.is_valid and not continues
        run_id = (target or current_target()).wandb_run_id
        span = tracer().start_span(
            name,
            context=parent,
            links=[Link(caller)] if linked else [],
            attributes={
                names.KIND: kind,
                **{names.TAG + key: value for key, value in tags.items()},
                **({} if run_id is None else {names.WANDB_RUN: run_id}),
                **attributes,
            },
        )
        with EnteredSpan(span, parent) as handle:
            handle.trace_stats = sums
            yield handle


def turn_span(index: int) -> "EnteredSpan":
    """One assistant turn: its generation and its tool calls."""
    return child_span(f"turn {index}", SpanKind.TURN, {names.TURN_INDEX: index})


def chat_span(model: str, params: SamplingParams) -> "EnteredSpan":
    """One generation by the rollout engine."""
    attributes: dict[str, Scalar] = {
        names.MODEL: model,
        names.TEMPERATURE: params.temperature,
        names.MAX_TOKENS: params.max_tokens,
    }
    if params.top_p < 1:
        attributes[names.TOP_P] = params.top_p
    if params.top_k > 0:
        attributes[names.TOP_K] = params.top_k
    if params.seed is not None:
        attributes[names.SEED] = params.seed
    if params.structured_outputs is not None:
        attributes[names.OUTPUT_TYPE] = "json"
    return child_span(f"chat {model}", SpanKind.CHAT, attributes)


def tool_span(name: str, arguments: Mapping[str, object], call_id: str | None) -> "EnteredSpan":
    """One execution of a tool, with its arguments."""
    attributes: dict[str, Scalar] = {names.TOOL_NAME: name}
    if call_id is not None:
        attributes[names.TOOL_CALL_ID] = call_id
    span = child_span(f"execute_tool {name}", SpanKind.TOOL, attributes)
    span.handle.inputs(dict(arguments))
    return span


def reward_span(name: str) -> "EnteredSpan":
    """One scoring by the reward service."""
    return child_span("reward", SpanKind.REWARD, {names.EVALUATION_NAME: name})


@contextmanager
def operation_span(name: str, target: TraceTarget | None = None) -> Iterator[SpanHandle]:
    """One traced function of a custom agent loop. A separate trace outside of one if `root_operations` is set."""
    tracing = active_tracing()
    alone = not trace.get_current_span().get_span_context().is_valid
    if alone and tracing is not None and tracing.root_operations:
        with root_span(name, {}, {names.TITLE: name}, True, target, SpanKind.OPERATION) as handle:
            yield handle
        return
    with child_span(name, SpanKind.OPERATION, {}) as handle:
        yield handle


def train_step_span(
    step: int, experiment_name: str, target: TraceTarget, name: str = "train step"
) -> AbstractContextManager[SpanHandle]:
    """One training step, or another part of a run: a separate trace named `<name> <step>`."""
    tags = {names.TRAIN_STEP: step, "experiment_name": experiment_name}
    title = f"{name} {step}"
    return root_span(title, tags, {names.TITLE: title}, record=True, target=target, kind=SpanKind.TRAIN_STEP)


def optimizer_step_span(index: int, consumed: Sequence[tuple[str, str]]) -> "EnteredSpan":
    """One optimizer step. `consumed` has the (trace id, root span id) in hex of the trajectories it trained on."""
    links = [_link(*span) for span in consumed]
    return child_span(f"optimizer_step {index}", SpanKind.OPTIMIZER_STEP, {}, links)


def call_span(op: str, samples: Sequence[str]) -> "EnteredSpan":
    """One request of a training loop of the caller's own, linked to its samples' spans by their `traceparent`."""
    links = [_link(*sample.split("-")[1:3]) for sample in samples]
    return child_span(op, SpanKind.OPTIMIZER_STEP if op == "optim_step" else SpanKind.OPERATION, {}, links)


def _link(trace_id: str, span_id: str) -> Link:
    return Link(SpanContext(int(trace_id, 16), int(span_id, 16), is_remote=True, trace_flags=TraceFlags(1)))


def set_outcome(span: SpanHandle, failure: str | None = None) -> None:
    """Tag the trace with the trajectory's outcome. Call it last, on the root.

    `failure` is `aborted` or `error:<code>`. None is `ok`, or the gravest incident that was recovered from.
    """
    incidents = span.trace_stats.incidents
    gravest = names.gravest(incidents)
    span.tag(names.OUTCOME, failure or (gravest.value if gravest else "ok"))
    if incidents:
        span.tag(names.INCIDENTS, ",".join(sorted(incidents)))


def child_span(
    name: str, kind: SpanKind, attributes: Mapping[str, Scalar], links: Sequence[Link] = ()
) -> "EnteredSpan":
    """A child of the current span. Recorded if the current span is."""
    current = trace.get_current_span()
    parent = current.get_span_context()
    if parent.is_valid and not parent.trace_flags.sampled:  # as the sampler decides, without its work
        return EnteredSpan(current, None)
    span = tracer().start_span(name, attributes={names.KIND: kind, **attributes}, links=links)
    return EnteredSpan(span, get_current())


class EnteredSpan:
    """Makes a span current inside the block, marks it ERROR if the block raises, and ends it.

    Without a `parent`, the span is the current one, which is not recorded, and stays as it is.
    """

    def __init__(self, span: Span, parent: Context | None) -> None:
        self.handle = SpanHandle(span)
        self._span = span
        self._inside = None if parent is None else trace.set_span_in_context(span, parent)

    def __enter__(self) -> SpanHandle:
        if self._inside is not None:
            self._token = attach(self._inside)
        return self.handle

    def __exit__(self, kind: object, error: BaseException | None, where: object) -> None:
        if error is not None:
            self._failed(error)
        if self._inside is not None:
            self._span.end()  # before detaching: the processor reads the target from the current context
            detach(self._token)

    def _failed(self, error: BaseException) -> None:
        code = error.code.value if isinstance(error, TrackwayError) else type(error).__name__
        self.handle.error(str(error) or type(error).__name__, code)
        if isinstance(error, Exception) and self.handle.recording:
            stack = "".join(traceback.format_exception(error))
            self.handle.event(
                "exception",
                **{"exception.type": type(error).__name__},
                **{"exception.message": str(error)},
                **{"exception.stacktrace": stack},
            )
