"""verl's two functions for tracing an agent loop (verl/utils/rollout_trace.py), used by changing the import.

Tracing never raises into a rollout and never changes the result of a traced function.
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
"""The experiment's name if `RolloutTraceConfig.init` was not called, as in a service that runs a custom loop."""


@contextmanager
def rollout_trace_attr(
    sample_index: int | str | None = None,
    step: int | None = None,
    rollout_n: int | None = None,
    name: str = "rollout_trace",
    validate: bool = False,
    trace: bool = True,
) -> Iterator[SpanHandle]:
    """Open a trajectory's trace called `name`; everything traced inside joins it, in any process.

    The tags are the arguments that are not None, `validate`, and the experiment's name. With `trace=False`, nothing
    inside is traced in any process.
    """
    if active_tracing() is None:
        yield _OFF
        return
    values = {"sample_index": sample_index, "step": step, "rollout_n": rollout_n, "validate": validate}
    record = trace and not _silenced()
    with NonRaisingSpan(lambda: _trajectory(values, name, record)) as span:
        outer = open_root.get()
        open_root.set(OpenRoot(span))
        try:
            yield span
        finally:
            open_root.set(outer)


def rollout_trace_op(function: Callable[P, R]) -> Callable[P, R]:
    """Trace each call of a function or method, sync or async: arguments without `self`, result, exception.

    With token2text, the span also has `prompt_text` and `response_text`, decoded by `self.tokenizer`. A generator
    function is returned unchanged.
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
    """Whether a span started here would be recorded."""
    tracing = active_tracing()
    if tracing is None:
        return False
    current = get_current_span().get_span_context()
    return current.trace_flags.sampled if current.is_valid else tracing.root_operations


def _silenced() -> bool:
    """Whether the current trace is not recorded, because of `trace=False` or an unsampled caller."""
    current = get_current_span().get_span_context()
    return current.is_valid and not current.trace_flags.sampled


def _trajectory(values: Mapping[str, object], name: str, record: bool) -> AbstractContextManager[SpanHandle]:
    experiment = RolloutTraceConfig.get_instance().experiment_name or DEFAULT_EXPERIMENT
    tags = {key: _tag(value) for key, value in values.items() if value is not None}
    tags["experiment_name"] = experiment
    shown = {names.AGENT_NAME: name, names.MLFLOW_TRACE_NAME: name, **_group(tags)}
    return root_span(name, tags, shown, record, own_target())


def _tag(value: object) -> names.Tag:
    """The value with its type, because Weave compares by type; numpy numbers become Python numbers."""
    plain = plain_number(value)
    return plain if isinstance(plain, str | bool | int | float) else str(plain)


def _group(tags: Mapping[str, names.Tag]) -> dict[str, str]:
    """Attributes of the GRPO group, which is the session and Weave's thread; empty if the tags do not identify it."""
    try:
        group = names.group_id(Tags.model_validate({"rollout_n": 0, **tags}))
    except ValidationError:
        return {}
    return {names.SESSION_ID: group, names.CONVERSATION_ID: group}
