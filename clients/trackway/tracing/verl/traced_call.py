"""One traced call of a user's function: its span, inputs, outputs, and the text of token ids."""

import asyncio
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from trackway.tracing.active import active_tracing, token2text
from trackway.tracing.span_handle import SpanHandle
from trackway.tracing.spans import operation_span
from trackway.tracing.verl.config import RolloutTraceConfig
from trackway.tracing.verl.safely import NonRaisingSpan
from trackway.tracing.verl.serialization import bounded, fields
from trackway.wire.tracing import TraceTarget


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
        """Arguments by name, with defaults, without `self` and `cls`; empty if they do not match the signature."""
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
    """The span of one call; it raises only what the block raises."""
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
    """Inputs and outputs of one call; no method raises."""

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
    """The target of `RolloutTraceConfig`; None when another tracing is active."""
    config = RolloutTraceConfig.get_instance()
    return config.target if config.client is not None and config.client is active_tracing() else None


def _first(*values: object) -> object:
    return next((value for value in values if value is not None), None)


def _parts(result: object) -> Mapping[str, object] | None:
    """The named parts of a result; None when it has none."""
    if isinstance(result, Mapping):
        return result
    try:
        return fields(result) or (dict(vars(result)) if hasattr(result, "__dict__") else None)
    except Exception:
        return None  # a property of the user's
