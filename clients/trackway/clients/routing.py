"""The rollout replica of each trajectory, by the prefix that it holds and the trajectories that live there.

A group starts where its prompt is, a trajectory stays on its replica, and replicas share the trajectories evenly. Where
these disagree, the constants say how many prompt tokens an engine may compute again for a better balance. They were
chosen by `benchmarks/routing.py`, which runs this module with simulated replicas. Counting a trajectory from the moment
of its choice keeps a new replica from getting all of them at once.
"""

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

START_TOKENS = 25.0
"""Prompt tokens that a new trajectory may cost for one trajectory fewer on its replica."""
MOVE_TOKENS = 375.0
"""Prompt tokens that a move may cost for one trajectory fewer on the replica."""
MOVE_MARGIN = 1.25
"""A trajectory moves to replicas with less than its own one's trajectories divided by this."""
MAX_GROUPS = 4096
MAX_TRAJECTORIES = 65_536
"""Most groups and trajectories that are remembered. The least recently used ones are forgotten first."""


@dataclass
class _Group:
    prompt_tokens: int
    """Length of the prompt that its trajectories share, taken from the shortest prompt so far."""
    replicas: set[str] = field(default_factory=set[str])
    """Replicas that computed them."""


class TrajectoryRouting:
    """Chooses a replica for each turn of each trajectory of one client. Pure: no I/O, no clock, no randomness."""

    def __init__(self) -> None:
        self._replicas: OrderedDict[str, str] = OrderedDict()
        self._trajectories: Counter[str] = Counter()
        self._groups: OrderedDict[str, _Group] = OrderedDict()
        self.moved = 0
        """Turns on another replica than the trajectory's turn before, since the start."""

    def place(self, trajectory: str, group: str, prompt_tokens: int, replicas: Sequence[str]) -> str:
        """Return the replica of a trajectory's next turn, on which it counts until it moves or is released.

        Args:
            trajectory: its id.
            group: id of its group, whose trajectories begin with the same prompt.
            prompt_tokens: length of the turn's prompt, earlier turns included.
            replicas: at least one. Of equally good replicas the earlier one is chosen.
        """
        shared = self._groups.setdefault(group, _Group(prompt_tokens))
        self._groups.move_to_end(group)
        shared.prompt_tokens = min(shared.prompt_tokens, prompt_tokens)
        current = self._replicas.get(trajectory)
        self.release(trajectory)
        stays = current in replicas

        def cost(replica: str) -> float:
            living = self._trajectories[replica]
            if replica == current:
                return living
            missing = prompt_tokens - (shared.prompt_tokens if replica in shared.replicas else 0)
            return living * MOVE_MARGIN + missing / MOVE_TOKENS if stays else living + missing / START_TOKENS

        best = min(replicas, key=cost)
        self.moved += current not in (None, best)
        shared.replicas.add(best)
        self._replicas[trajectory] = best
        self._trajectories[best] += 1
        self._bound()
        return best

    def release(self, trajectory: str) -> None:
        """Count a trajectory no longer: it has ended. An unknown one is ignored."""
        current = self._replicas.pop(trajectory, None)
        if current is not None:
            self._trajectories[current] -= 1
            if not self._trajectories[current]:
                del self._trajectories[current]

    def _bound(self) -> None:
        while len(self._replicas) > MAX_TRAJECTORIES:
            self.release(next(iter(self._replicas)))
        while len(self._groups) > MAX_GROUPS:
            self._groups.popitem(last=False)
