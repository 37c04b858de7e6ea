"""Metrics of tools: calls by tool and result, their duration, and the number of instances."""

import asyncio
from collections.abc import Iterator, Sized
from contextlib import contextmanager

from prometheus_client import Counter, Gauge

from trackway.serving.metrics import Collectors, seconds_histogram
from trackway.wire.errors import TrackwayError


class ToolCalls(Collectors):
    """Counts the tool calls of this process."""

    def __init__(self, instances: Sized) -> None:
        self._calls = Counter("trackway_tool_calls", "Calls by tool and result", ["tool", "result"], registry=None)
        self._seconds = seconds_histogram("trackway_tool_seconds", "Duration of tool calls in seconds", "tool")
        count = Gauge("trackway_tool_instances", "Tool instances that exist", registry=None)
        count.set_function(lambda: len(instances))
        super().__init__(self._calls, self._seconds, count)

    @contextmanager
    def one(self, tool: str) -> Iterator[None]:
        """Around one call; its result is `ok`, an error's code, or `cancelled` when its caller left."""
        result = "internal"
        try:
            with self._seconds.labels(tool).time():
                yield
            result = "ok"
        except TrackwayError as error:
            result = error.code.value
            raise
        except asyncio.CancelledError:
            result = "cancelled"
            raise
        finally:
            self._calls.labels(tool, result).inc()
