"""verl's two functions for tracing an agent loop (verl/utils/rollout_trace.py), used by changing the import.

Users import them from `trackway.tracing`. The services use `tracing.spans`.

Tracing never raises into a rollout and never changes the result of a traced function. Traced functions have arbitrary
arguments: lists of a million ids, cyclic objects, a repr that raises. So values are serialized as bounded JSON at a
bounded cost.
"""

import asyncio
import dataclasses
import inspect
import logging
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from functools import wraps
from itertools import islice
from types import TracebackType
from typing import ParamSpec, TypeVar

from opentelemetry.trace import INVALID_SPAN, get_current_span
from pydantic import BaseModel, ValidationError

from trackway.tracing import attributes as names
from trackway.tracing.settings import redacted
from trackway.tracing.span_handle import SpanHandle, active_tracing, token2text
from trackway.tracing.spans import operation_span, root_span
from trackway.tracing.verl_config import RolloutTraceConfig
from trackway.wire.base import named_number
from trackway.wire.trajectory import Tags, TraceTarget

MAX_ITEMS = 512
"""Most items of one list or mapping. The rest is only counted."""
MAX_VALUES = 4096
"""Most values of the whole payload."""
MAX_DEPTH = 12
MAX_BITS = 1024
HUGE_TEXT = 1 << 20
"""Characters. A longer text is cut here already, a shorter one only with all others, by a limit in bytes."""
KEPT_OF_HUGE = 4096


def bounded(value: object) -> object:
    """A bounded copy of `value` of plain dicts, lists, strings and numbers. Never raises."""
    return _Copy().of(value, 0)


def plain_number(value: object) -> object:
    """A scalar of numpy or torch as a Python number; any other value unchanged."""
    item = getattr(value, "item", None)
    return item() if callable(item) and getattr(value, "ndim", None) == 0 else value


def fields(value: object) -> dict[str, object] | None:
    """The named parts of a pydantic model or a dataclass, not copied, or None for anything else."""
    if isinstance(value, BaseModel):
        return dict(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    return None


class _Copy:
    """One payload being copied."""

    def __init__(self) -> None:
        self._left = MAX_VALUES

    def of(self, value: object, depth: int) -> object:
        """The copy of one part."""
        self._left -= 1
        try:
            return self._of(value, depth)
        except Exception as error:
            # The value's own code ran: iteration, repr, properties.
            return f"[not shown: {type(error).__name__}]"

    def _of(self, value: object, depth: int) -> object:
        if value is None or isinstance(value, str | bool | int | float | bytes | bytearray):
            return _leaf(value)
        if depth >= MAX_DEPTH:
            return "[too deep]"
        parts = value if isinstance(value, Mapping) else fields(value)
        if parts is not None:
            return self._dict(parts, depth + 1)
        if isinstance(value, list | tuple | set | frozenset | deque):
            return self._list(value, depth + 1)
        if isinstance(value, Enum):
            return self.of(value.value, depth + 1)
        number = plain_number(value)
        return _leaf(repr(value) if number is value else number)

    def _dict(self, parts: Mapping[object, object] | Mapping[str, object], depth: int) -> dict[str, object]:
        kept = min(MAX_ITEMS, max(0, self._left))
        copy = {str(key): self.of(item, depth) for key, item in islice(parts.items(), kept)}
        return copy if len(parts) <= kept else {**copy, "...": f"[{len(parts) - kept} more]"}

    def _list(self, parts: Collection[object], depth: int) -> list[object]:
        kept = min(MAX_ITEMS, max(0, self._left))
        copy = [self.of(item, depth) for item in islice(parts, kept)]
        return copy if len(parts) <= kept else [*copy, f"[{len(parts) - kept} more]"]


def _leaf(value: object) -> object:
    if isinstance(value, bytes | bytearray):
        return f"[{len(value)} bytes]"
    if isinstance(value, float):
        return named_number(float(value))
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        return f"[a number of {value.bit_length()} bits]"
    return _text(value) if isinstance(value, str) else value


def _text(value: str) -> str:
    if len(value) > HUGE_TEXT:
        tracing = active_tracing()
        value = redacted(value, tracing.redact if tracing else None)  # before a secret is cut in two
        if len(value) > KEPT_OF_HUGE:
            value = f"{value[:KEPT_OF_HUGE]}[truncated {len(value) - KEPT_OF_HUGE} characters]"
    return value if value.isascii() else value.encode(errors="replace").decode()


logger = logging.getLogger("trackway.tracing")


class NonRaisingSpan:
    """Opens and ends a span around user code. Errors of the span itself are logged and not raised."""

    def __init__(self, make: Callable[[], AbstractContextManager[SpanHandle]]) -> None:
        self._make = make
        self._span: AbstractContextManager[SpanHandle] | None = None

    def __enter__(self) -> SpanHandle:
        try:
            span = self._make()
            handle = span.__enter__()
        except Exception:
            logger.exception("a span could not be opened")
            return SpanHandle(INVALID_SPAN)
        self._span = span
        return handle

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, stack: TracebackType | None
    ) -> None:
        if self._span is None:
            return
        try:
            self._span.__exit__(kind, error, stack)
        except Exception as trouble:
            if trouble is not error:
                logger.exception("a span could not be ended")


@dataclass
class OpenRoot:
    """A trajectory's root span, which shows the inputs of its first operation and the outputs of its last."""

    span: SpanHandle
    shows_inputs: bool = False


open_root: ContextVar[OpenRoot | None] = ContextVar("trackway_open_root", default=None)
"""Set where the next operation is a direct child of the root."""


class Operation:
    """A traced function: its name and signature."""

    def __init__(self, function: Callable[..., object]) -> None:
        self.name: str = getattr(function, "__qualname__", type(function).__name__)
        try:
            self._signature = inspect.signature(function)
        except (TypeError, ValueError):  # some that are written in C
            self._signature = inspect.Signature.from_callable(lambda *args, **kwargs: None)
        first = next(iter(self._signature.parameters), "")
        self._owner = first if first in ("self", "cls") else None

    def arguments(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> dict[str, object]:
        """Arguments by name, with defaults, without `self` and `cls`. Empty if they do not match the signature."""
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError:
            return {}
        bound.apply_defaults()
        return {name: value for name, value in bound.arguments.items() if name != self._owner}

    def decoder(self, args: tuple[object, ...]) -> Callable[[object], object] | None:
        """`self.tokenizer.decode` if it exists and the trace includes text, else None."""
        if self._owner is None or not args or not token2text():
            return None
        try:
            decode = getattr(getattr(args[0], "tokenizer", None), "decode", None)
        except Exception:
            return None  # a property of the user's
        return decode if callable(decode) else None


@contextmanager
def recorded_call(
    operation: Operation, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> Iterator["RecordedCall"]:
    """The span of one call. It raises only what the block raises."""
    root = open_root.get()
    open_root.set(None)
    try:
        with NonRaisingSpan(lambda: operation_span(operation.name, own_target())) as span:
            call = RecordedCall(span, root, operation.arguments(args, kwargs), operation.decoder(args))
            call.take()
            yield call
    finally:
        open_root.set(root)


class RecordedCall:
    """Inputs and outputs of one call. No method raises."""

    def __init__(
        self,
        span: SpanHandle,
        root: OpenRoot | None,
        inputs: Mapping[str, object],
        decode: Callable[[object], object] | None,
    ) -> None:
        self._span = span
        self._root = root
        self._inputs = inputs
        self._decode = decode

    def take(self) -> None:
        """Set the arguments as the span's inputs."""
        shown = bounded(self._inputs)
        self._span.inputs(shown)
        if self._root is not None and not self._root.shows_inputs:
            self._root.shows_inputs = True
            self._root.span.inputs(shown)

    def give(self, result: object, texts: Mapping[str, str]) -> None:
        """Set the result as the span's outputs; with texts, the texts and the result's named parts."""
        shown = bounded({**texts, **(_parts(result) or {"output": result})} if texts else result)
        self._span.outputs(shown)
        if self._root is not None:
            self._root.span.outputs(shown)

    def texts(self, result: object) -> dict[str, str]:
        """`prompt_text` and `response_text` of the token ids in the result, or in the arguments."""
        wanted = {} if self._decode is None else self._token_ids(result)
        return {name: self._text(ids) for name, ids in wanted.items()}

    async def texts_aside(self, result: object) -> dict[str, str]:
        """Like `texts`, in a thread, because decoding would block the event loop."""
        if self._decode is None or not self._token_ids(result):
            return {}
        try:
            return await asyncio.get_running_loop().run_in_executor(None, self.texts, result)
        except RuntimeError:
            return {}  # the loop's threads have ended, as the process is about to

    def _token_ids(self, result: object) -> dict[str, object]:
        parts = _parts(result) or {}
        prompt = _first(parts.get("prompt_ids"), self._inputs.get("prompt_ids"))
        response = _first(parts.get("response_ids"), parts.get("token_ids"))
        return {name: ids for name, ids in (("prompt_text", prompt), ("response_text", response)) if ids is not None}

    def _text(self, ids: object) -> str:
        try:
            return "" if self._decode is None else str(self._decode(ids))
        except Exception as error:
            return f"[not decoded: {type(error).__name__}]"


def own_target() -> TraceTarget | None:
    """The target of `RolloutTraceConfig`, or None when another tracing is active."""
    config = RolloutTraceConfig.get_instance()
    return config.target if config.client is not None and config.client is active_tracing() else None


def _first(*values: object) -> object:
    return next((value for value in values if value is not None), None)


def _parts(result: object) -> Mapping[str, object] | None:
    """Return the named parts of a result, or None for a result without names."""
    if isinstance(result, Mapping):
        return result
    try:
        return fields(result) or (dict(vars(result)) if hasattr(result, "__dict__") else None)
    except Exception:
        return None  # a property of the user's


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
    """Return whether a span started here would be recorded."""
    tracing = active_tracing()
    if tracing is None:
        return False
    current = get_current_span().get_span_context()
    return current.trace_flags.sampled if current.is_valid else tracing.root_operations


def _silenced() -> bool:
    """Return whether the current trace is not recorded, because of `trace=False` or an unsampled caller."""
    current = get_current_span().get_span_context()
    return current.is_valid and not current.trace_flags.sampled


def _trajectory(values: Mapping[str, object], name: str, record: bool) -> AbstractContextManager[SpanHandle]:
    experiment = RolloutTraceConfig.get_instance().experiment_name or DEFAULT_EXPERIMENT
    tags = {key: _tag(value) for key, value in values.items() if value is not None}
    tags["experiment_name"] = experiment
    shown = {names.AGENT_NAME: name, names.TITLE: name, **_group(tags)}
    return root_span(name, tags, shown, record, own_target())


def _tag(value: object) -> names.Tag:
    """The value with its type, because Weave compares by type. NumPy numbers become Python numbers."""
    plain = plain_number(value)
    return plain if isinstance(plain, str | bool | int | float) else str(plain)


def _group(tags: Mapping[str, names.Tag]) -> dict[str, str]:
    """Attributes of the GRPO group, which is the session and Weave's thread. Empty if the tags do not identify it."""
    try:
        group = names.group_id(Tags.model_validate({"rollout_n": 0, **tags}))
    except ValidationError:
        return {}
    return {names.GROUP: group}
