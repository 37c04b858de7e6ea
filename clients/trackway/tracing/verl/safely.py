"""A span that never raises into the code it traces."""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType

from opentelemetry.trace import INVALID_SPAN

from trackway.tracing.span_handle import SpanHandle

logger = logging.getLogger("trackway.tracing")


class NonRaisingSpan:
    """Opens and ends a span around user code; errors of the span itself are logged and not raised."""

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
