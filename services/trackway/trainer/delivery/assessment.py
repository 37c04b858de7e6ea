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
    """Whether the trace is to be linked to the run."""

    @property
    def size(self) -> int:
        """The number of values; a link counts as one."""
        return len(self.values) + self.link
