"""What a run waits for at present, as a tree: a wait and what that itself waits for."""

from pydantic import Field

from trackway.wire.base import WireReply


class Wait(WireReply):
    """A wait in progress, or a computation that others wait for."""

    who: str
    """Who waits: `the learner`, `group 5/17` (step and prompt), `rollout 5/17/0`."""
    waits_for: str
    """What for: `rollouts of step 5`, `tool python`."""
    since: int
    """Milliseconds since 1970."""
    until: int | None = None
    """Its deadline in milliseconds since 1970; None without one."""
    progress: str = ""
    """How far it is, and its newest problem."""
    because: list["Wait"] = Field(default_factory=list["Wait"])
    """What it is that takes so long, the longest wait first; only as many as help."""
