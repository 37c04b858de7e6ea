"""Converts a server's tokens to pieces and generations; pure functions."""

import itertools
import math
from collections.abc import Iterator, Sequence

from trackway.rollout.engines.protocol import Piece
from trackway.rollout.engines.remote.requests import Call, TokenChunk
from trackway.wire.errors import ErrorCode, TrackwayError


def runs(names: Sequence[str]) -> Iterator[tuple[str, int, int]]:
    """Runs of adjacent tokens with the same name: (name, start, end)."""
    start = 0
    for name, group in itertools.groupby(names):
        end = start + sum(1 for _ in group)
        yield name, start, end
        start = end


def until_stop(call: Call, got: TokenChunk, start: int, end: int, version: int) -> tuple[Piece, bool]:
    """Tokens [start, end) up to the first stop token, and whether there was one."""
    stop = next((at + 1 for at in range(start, end) if got.token_ids[at] in call.stops), None)
    logprobs = [*got.logprobs[start : stop or end]]
    if not all(map(math.isfinite, logprobs)):
        message = f"expected finite logprobs, got {logprobs} from weights version {version}; check the training run"
        raise TrackwayError(ErrorCode.ENGINE_FAILED, message)
    return Piece([*got.token_ids[start : stop or end]], logprobs, version), stop is not None
