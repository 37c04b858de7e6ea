"""The seed of each generation, derived from the trajectory's identity only."""

import hashlib

from trackway.wire.trajectory import Tags


def request_seed(base: int | None, tags: Tags, turn: int, part: int = 0) -> int | None:
    """32 bits of SHA-256 over (base, validation, step, sample_index, rollout_n, turn); None stays None.

    The run's name and the rest of the batch are not part of it, so repeating a step draws the same tokens. `part`
    counts the continuations of an aborted turn; the first part's seed does not depend on it.
    """
    if base is None:
        return None
    turn_name = f"{turn}" if part == 0 else f"{turn}+{part}"
    source = f"{base}/{tags.validation}/{tags.step}/{tags.sample_index}/{tags.rollout_n}/{turn_name}"
    return int.from_bytes(hashlib.sha256(source.encode()).digest()[:4])
