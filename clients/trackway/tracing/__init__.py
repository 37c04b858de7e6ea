"""One trajectory, one trace: plain OpenTelemetry, with the attributes that MLflow and W&B Weave read.

The agent opens `trajectory_span` as a new root. `turn_span`, `chat_span`, `tool_span` and `reward_span` join it from
their own processes through the W3C headers that `inject` writes and `extracted` reads. `RolloutTraceConfig`,
`rollout_trace_attr` and `rollout_trace_op` are verl's API for the same, used by custom agent loops.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from trackway.tracing.context import TraceStats, collect_trace_stats, current_trace_stats, extracted, inject
from trackway.tracing.span_handle import (
    SpanHandle,
    activated,
    add_event,
    add_incident,
    install,
    set_tools,
    token2text,
    truncate,
)

if TYPE_CHECKING:
    from trackway.tracing.export.queues import BackendStats
    from trackway.tracing.provider import SpanStats, Tracing
    from trackway.tracing.settings import TracingSettings
    from trackway.tracing.spans import (
        chat_span,
        optimizer_step_span,
        reward_span,
        set_outcome,
        tool_span,
        train_step_span,
        trajectory_span,
        turn_span,
    )
    from trackway.tracing.verl import rollout_trace_attr, rollout_trace_op
    from trackway.tracing.verl_config import RolloutTraceConfig

__all__ = [
    "BackendStats",
    "RolloutTraceConfig",
    "SpanHandle",
    "SpanStats",
    "TraceStats",
    "Tracing",
    "TracingSettings",
    "activated",
    "add_event",
    "add_incident",
    "chat_span",
    "collect_trace_stats",
    "current_trace_stats",
    "extracted",
    "inject",
    "install",
    "optimizer_step_span",
    "reward_span",
    "rollout_trace_attr",
    "rollout_trace_op",
    "set_outcome",
    "set_tools",
    "token2text",
    "tool_span",
    "train_step_span",
    "trajectory_span",
    "truncate",
    "turn_span",
]

_LATE = {
    "BackendStats": "export.queues",
    "RolloutTraceConfig": "verl_config",
    "SpanStats": "provider",
    "Tracing": "provider",
    "TracingSettings": "settings",
    "rollout_trace_attr": "verl",
    "rollout_trace_op": "verl",
}
"""Modules imported at first use: they need OpenTelemetry's SDK, which a process that only calls services does not."""


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LATE.get(name, 'spans')}"), name)
