"""Values about a trace that its spans do not say, as they wait on disk for a backend."""

from collections.abc import Mapping

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

Value = float | str


@dataclass(frozen=True, config=ConfigDict(ser_json_inf_nan="strings"))
class Assessment:
    """Values by name for one trace, of a trajectory or of a step."""

    trace_id: str
    """32 hex digits."""
    span_id: str
    """16 hex digits: its root span."""
    values: Mapping[str, Value]
    link: bool = False
    """Whether the trace must still be linked to the run: it was made before MLflow had said the run's id."""
