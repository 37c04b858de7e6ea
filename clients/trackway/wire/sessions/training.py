"""Sessions of a deployed agent on their way to the run that trains on them."""

from pydantic import Field

from trackway.wire.agent import Limits
from trackway.wire.base import Int, WireReply, WireRequest
from trackway.wire.names import Label, RunName
from trackway.wire.rollout import SamplingParams
from trackway.wire.sample_index import SampleIndex
from trackway.wire.tracing import TraceTarget
from trackway.wire.trajectory import Trajectory

SESSION_ID = r"s-([0-9a-z]{4,32})-[0-9a-f]{32}"
"""A session's id names the agent replica that it lives in."""


class TrainedSession(WireRequest):
    """Which run trains on a session once it has ended, and with which sessions it is compared."""

    run: RunName | None = None
    """None: the run in progress."""
    group: SampleIndex | None = None
    """Sessions of one group had the same task; None takes the sample's `extra_info.index`."""


class SessionRun(WireReply):
    """Settings that a run fixes for each session that it trains on."""

    run: RunName
    experiment_name: Label
    step: Int = 0
    """The step that is next when the session is opened: the tag `step` of its trace."""
    sampling_params: SamplingParams
    limits: Limits
    min_weight_version: Int = 0
    """The newest weights of the run, or the first that it will publish."""
    trace_target: TraceTarget


class FinishedSession(WireRequest):
    """A session that has ended and is scored."""

    session_id: str = Field(pattern=f"^{SESSION_ID}$")
    group: SampleIndex
    trajectory: Trajectory


class WaitingSessions(WireReply):
    """The sessions that a run has not drawn yet."""

    waiting: Int
