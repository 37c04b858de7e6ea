"""verl's two names for tracing an agent loop (verl/utils/rollout_trace.py): move a loop over by changing the import.

Nothing here raises into a rollout, and nothing changes what a traced function returns.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import ParamSpec, TypeVar

from opentelemetry.trace import INVALID_SPAN, get_current_span
from pydantic import ValidationError

from trackway.tracing import attributes as names
from trackway.tracing.active import active_tracing
from trackway.tracing.span_handle import SpanHandle
from trackway.tracing.spans import root_span
from trackway.tracing.verl.config import RolloutTraceConfig
from trackway.tracing.verl.safely import NonRaisingSpan
from trackway.tracing.verl.serialization import plain_number
from trackway.tracing.verl.traced_call import OpenRoot, Operation, open_root, own_target, recorded_call
from trackway.wire.trajectory import Tags

P = ParamSpec("P")
R = TypeVar("R")

_OFF = SpanHandle(INVALID_SPAN)
DEFAULT_EXPERIMENT = "default"
"""The tag where nobody called `RolloutTraceConfig.init`, as in a service that runs somebody's loop."""


@contextmanager
def rollout_trace_attr(
    sample_index: int | str | None = None,
    step: int | None = None,
    rollout_n: int | None = None,
    name: str = "rollout_trace",
    validate: bool = False,
    trace: bool = True,
) -> Iterator[SpanHandle]:
    """Open a trajectory, a trace called `name`: everything traced inside joins its tree, whatever process it runs in.

    Its tags are the arguments that are given, `validate`, and the experiment's name. With `trace=False` nothing inside
    is traced, in any process.
    """
    if active_tracing() is None:
        yield _OFF
        return
    given = {"sample_index": sample_index, "step": step, "rollout_n": rollout_n, "validate": validate}
    record = trace and not _silenced()
    with NonRaisingSpan(lambda: _trajectory(given, name, record)) as span:
        outer = open_root.get()
        open_root.set(OpenRoot(span))
        try:
            yield span
        finally:
            open_root.set(outer)


def rollout_trace_op(function: Callable[P, R]) -> Callable[P, R]:
    """Trace each call of a function or method, sync or async: arguments without `self`, result, exception.

    With token2text also `prompt_text` and `response_text`, where `self.tokenizer` decodes them. A generator function is
    given back as it is.
    """
    if isinstance(function, staticmethod | classmethod):
        return type(function)(rollout_trace_op(function.__func__))  # pyright: ignore[reportReturnType]
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        return function  # pyright: ignore[reportReturnType]
    operation = Operation(function)

    if inspect.iscoroutinefunction(function):

        @wraps(function)
        async def traced_async(*args: P.args, **kwargs: P.kwargs) -> object:
            if not _recorded():
                return await function(*args, **kwargs)
            with recorded_call(operation, args, kwargs) as call:
                result = await function(*args, **kwargs)
                call.give(result, await call.texts_aside(result))
                return result

        return traced_async  # pyright: ignore[reportReturnType]  a coroutine function keeps R = Coroutine

    @wraps(function)
    def traced(*args: P.args, **kwargs: P.kwargs) -> R:
        if not _recorded():
            return function(*args, **kwargs)
        with recorded_call(operation, args, kwargs) as call:
            result = function(*args, **kwargs)
            call.give(result, call.texts(result))
            return result

    return traced


def _recorded() -> bool:
    """Whether a span that begins here would be kept."""
    tracing = active_tracing()
    if tracing is None:
        return False
    current = get_current_span().get_span_context()
    return current.trace_flags.sampled if current.is_valid else tracing.root_operations


def _silenced() -> bool:
    """Whether we stand inside a trace that is not recorded: `trace=False`, or a caller that does not sample."""
    current = get_current_span().get_span_context()
    return current.is_valid and not current.trace_flags.sampled


def _trajectory(given: Mapping[str, object], name: str, record: bool) -> AbstractContextManager[SpanHandle]:
    experiment = RolloutTraceConfig.get_instance().experiment_name or DEFAULT_EXPERIMENT
    tags = {key: _tag(value) for key, value in given.items() if value is not None}
    tags["experiment_name"] = experiment
    shown = {names.AGENT_NAME: name, names.MLFLOW_TRACE_NAME: name, **_group(tags)}
    return root_span(name, tags, shown, record, own_target())


def _tag(value: object) -> names.Tag:
    """In its own type, as Weave compares by type; a number of numpy is a number."""
    plain = plain_number(value)
    return plain if isinstance(plain, str | bool | int | float) else str(plain)


def _group(tags: Mapping[str, names.Tag]) -> dict[str, str]:
    """The GRPO group, which is the session and Weave's thread, when the tags say which it is."""
    try:
        group = names.group_id(Tags.model_validate({"rollout_n": 0, **tags}))
    except ValidationError:
        return {}
    return {names.SESSION_ID: group, names.CONVERSATION_ID: group}
