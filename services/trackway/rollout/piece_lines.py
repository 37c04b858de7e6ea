"""A streamed generation as lines of NDJSON."""

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing

from trackway.rollout.service import RolloutService
from trackway.serving.middleware import unforeseen
from trackway.tracing import collect_trace_stats
from trackway.wire.errors import TrackwayError
from trackway.wire.rollout import GeneratePiece, GenerateRequest

_log = logging.getLogger(__name__)


async def piece_lines(service: RolloutService, request: GenerateRequest) -> AsyncGenerator[str]:
    """A line for each GeneratePiece; the last has the receipt, and the error of a generation that failed."""
    last = GeneratePiece()
    with collect_trace_stats() as stats:
        try:
            async with aclosing(service.stream(request)) as pieces:
                async for piece in pieces:
                    yield _line(
                        GeneratePiece(
                            token_ids=piece.token_ids,
                            logprobs=piece.logprobs,
                            top_logprobs=[*piece.top_logprobs],
                            version=piece.version,
                            weight_versions=[*piece.weight_versions],
                            finish_reason=piece.finish_reason,
                        )
                    )
        except TrackwayError as error:
            last.error = error.to_reply().error
        except Exception as error:
            _log.exception("a streamed generation failed")
            last.error = unforeseen(error).to_reply().error
        last.receipt = stats.receipt()
    yield _line(last)


def _line(piece: GeneratePiece) -> str:
    return piece.model_dump_json(exclude_defaults=True) + "\n"
