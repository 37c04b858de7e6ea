"""One trajectory, one trace: plain OpenTelemetry, with the attributes that MLflow and W&B Weave read.

The agent opens `trajectory_span` as a fresh root; `turn_span`, `chat_span`, `tool_span` and `reward_span` join it from
their own processes through the W3C headers that `inject` writes and `extracted` reads. `rollout_trace_attr` and
`rollout_trace_op` are the same in verl's spelling, for people's own agent loops.
"""

from trackway.tracing.context import extracted, inject, token2text
from trackway.tracing.op import rollout_trace_attr, rollout_trace_op
from trackway.tracing.provider import SpanStats, Tracing, TracingSettings
from trackway.tracing.spans import (
    SpanHandle,
    add_event,
    chat_span,
    reward_span,
    set_outcome,
    tool_span,
    trajectory_span,
    turn_span,
)

__all__ = [
    "SpanHandle",
    "SpanStats",
    "Tracing",
    "TracingSettings",
    "add_event",
    "chat_span",
    "extracted",
    "inject",
    "reward_span",
    "rollout_trace_attr",
    "rollout_trace_op",
    "set_outcome",
    "token2text",
    "tool_span",
    "trajectory_span",
    "turn_span",
]
