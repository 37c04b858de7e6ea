"""What the trainer knows about a trace and the trace does not: which run it belongs to, its reward, its advantage.

Links need only ids. Feedback needs the trace to have arrived at MLflow, which takes a second or two after the
trajectory ended, so it is tried again until its patience ends. All of it happens in the background.
"""

from collections.abc import Sequence
from typing import Protocol

from trackway.trainer.background import Background
from trackway.wire.trajectory import Trajectory


class TraceRun(Protocol):
    """The part of an MLflow run that feedback needs."""

    def link_traces(self, trace_ids: Sequence[str]) -> None:
        """Make the traces part of the run."""
        ...

    def log_feedback(self, trace_id: str, name: str, value: float) -> None:
        """Record a value on a trace; raises NotYet while it has not arrived."""
        ...


class Feedback:
    """Links traced trajectories to the run and records reward and advantage on them."""

    def __init__(self, run: TraceRun, background: Background, patience_s: float, assessments: bool = True) -> None:
        self._run = run
        self._background = background
        self._patience_s = patience_s
        self._assessments = assessments

    def record(self, trajectories: Sequence[Trajectory], advantages: Sequence[float] | None = None) -> None:
        """Queue the links and values of the trajectories that have a trace; returns at once.

        `advantages`, when given, are aligned with `trajectories`.
        """
        traced = [(place, one.trace_id) for place, one in enumerate(trajectories) if one.trace_id is not None]
        if not traced:
            return
        ids = [trace_id for _, trace_id in traced]
        self._background.submit(lambda: self._run.link_traces(ids))
        for place, trace_id in traced if self._assessments else ():
            reward = trajectories[place].reward
            if reward is not None:
                self._assess(trace_id, "reward", reward.score)
                if advantages is not None:
                    self._assess(trace_id, "advantage", advantages[place])

    def _assess(self, trace_id: str, name: str, value: float) -> None:
        self._background.submit(lambda: self._run.log_feedback(trace_id, name, value), self._patience_s)
