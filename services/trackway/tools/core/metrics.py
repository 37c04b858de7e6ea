"""Metrics of tools: calls by tool and result, their duration, and the number of instances."""

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Sized
from contextlib import contextmanager

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from trackway.serving.metrics import Seconds, counted
from trackway.wire.errors import TrackwayError


class ToolCalls(Collector):
    """Counts the tool calls of this process."""

    def __init__(self, instances: Sized) -> None:
        self._instances = instances
        self._calls: Counter[tuple[str, str]] = Counter()
        self._seconds = Seconds()

    @contextmanager
    def one(self, tool: str) -> Iterator[None]:
        """Around one call; its result is `ok`, an error's code, or `cancelled` when its caller left."""
        began, result = time.perf_counter(), "internal"
        try:
            yield
            result = "ok"
        except TrackwayError as error:
            result = error.code.value
            raise
        except asyncio.CancelledError:
            result = "cancelled"
            raise
        finally:
            self._calls[tool, result] += 1
            self._seconds.add(tool, time.perf_counter() - began)

    def collect(self) -> Iterator[Metric]:
        """As Prometheus wants it."""
        yield counted("trackway_tool_calls", "Calls by tool and result", ("tool", "result"), self._calls)
        yield self._seconds.family("trackway_tool_seconds", "Duration of tool calls in seconds", "tool")
        yield GaugeMetricFamily("trackway_tool_instances", "Tool instances that exist", len(self._instances))
