"""The seed of each generation, derived from what the trajectory is and not from when or where it runs."""

import hashlib

from trackway.wire.trajectory import Tags


def request_seed(base: int | None, tags: Tags, turn: int, part: int = 0) -> int | None:
    """32 bits of SHA-256 over (base, validation, step, sample_index, rollout_n, turn); None stays None.

    The run's name and the rest of the batch are left out, so that two runs of one step draw the same tokens. `part`
    counts the continuations of a turn that the engine cut, and changes nothing for the first.
    """
    if base is None:
        return None
    turn_name = f"{turn}" if part == 0 else f"{turn}+{part}"
    source = f"{base}/{tags.validation}/{tags.step}/{tags.sample_index}/{tags.rollout_n}/{turn_name}"
    return int.from_bytes(hashlib.sha256(source.encode()).digest()[:4])
