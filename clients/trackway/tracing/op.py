"""verl's two names for tracing an agent loop (verl/utils/rollout_trace.py): move a loop over by changing the import."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import ParamSpec, TypeVar

from trackway.tracing.handle import SpanHandle
from trackway.tracing.spans import operation_span, trajectory_span
from trackway.wire.trajectory import Tags, trajectory_id

P = ParamSpec("P")
R = TypeVar("R")


@contextmanager
def rollout_trace_attr(
    sample_index: int = 0,
    step: int = 0,
    rollout_n: int = 0,
    name: str = "rollout_trace",
    validate: bool = False,
    trace: bool = True,
    experiment_name: str = "default",
) -> Iterator[SpanHandle]:
    """Open a trajectory: everything traced inside joins its tree; with `trace=False` nothing inside is traced."""
    tags = Tags(
        experiment_name=experiment_name,
        step=step,
        sample_index=sample_index,
        rollout_n=rollout_n,
        validate=validate,
    )
    identity = trajectory_id(experiment_name, tags)
    with trajectory_span(tags, identity, identity, name, [], record=trace) as span:
        yield span


def rollout_trace_op(function: Callable[P, R]) -> Callable[P, R]:
    """Trace each call of a function or method, sync or async: arguments without `self`, result, exception."""
    signature = inspect.signature(function)

    def arguments(*args: P.args, **kwargs: P.kwargs) -> dict[str, object]:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return {key: value for key, value in bound.arguments.items() if key != "self"}

    if inspect.iscoroutinefunction(function):

        @wraps(function)
        async def traced_async(*args: P.args, **kwargs: P.kwargs) -> object:
            with operation_span(function.__qualname__) as span:
                if span.recording:
                    span.inputs(arguments(*args, **kwargs))
                result = await function(*args, **kwargs)
                span.outputs(result)
                return result

        return traced_async  # pyright: ignore[reportReturnType]  a coroutine function keeps R = Coroutine

    @wraps(function)
    def traced(*args: P.args, **kwargs: P.kwargs) -> R:
        with operation_span(function.__qualname__) as span:
            if span.recording:
                span.inputs(arguments(*args, **kwargs))
            result = function(*args, **kwargs)
            span.outputs(result)
            return result

    return traced
