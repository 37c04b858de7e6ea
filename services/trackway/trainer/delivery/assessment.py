"""Values about a trace that its spans do not contain, as queued on disk for a backend."""

from collections.abc import Mapping

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

Value = float | str


@dataclass(frozen=True, config=ConfigDict(ser_json_inf_nan="strings"))
class Assessment:
    """Values by name for the trace of a trajectory or a step."""

    trace_id: str
    """32 hex digits."""
    span_id: str
    """16 hex digits, of the trace's root span."""
    values: Mapping[str, Value]
    link: bool = False
    """Whether the trace is still to be linked to the run: it was recorded before MLflow had returned the run's id."""
