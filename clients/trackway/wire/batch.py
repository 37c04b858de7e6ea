"""Batches: several requests of one kind in one HTTP request, each with its own trace, reply and error."""

from typing import Annotated, Generic, TypeVar

from pydantic import BaseModel, Field

from trackway.wire.base import WireReply, WireRequest
from trackway.wire.errors import ErrorBody

RequestT = TypeVar("RequestT", bound=BaseModel)
ReplyT = TypeVar("ReplyT", bound=BaseModel)

TraceHeader = Annotated[str, Field(max_length=8192)]
"""W3C's limit of the header `baggage`."""

MAX_BATCH = 64
"""Most requests in a batch."""


class BatchEntry(WireRequest, Generic[RequestT]):
    """One request of a batch. It has the same reply as it would have on its own."""

    request: RequestT
    trace: dict[str, TraceHeader] = Field(default_factory=dict[str, TraceHeader], max_length=3)
    """The headers `traceparent`, `tracestate` and `baggage` of the request's own trace."""


class BatchRequest(WireRequest, Generic[RequestT]):
    """Requests to run at the same time."""

    entries: list[BatchEntry[RequestT]] = Field(min_length=1, max_length=MAX_BATCH, fail_fast=True)


class BatchResult(WireReply, Generic[ReplyT]):
    """The reply or the error of one entry."""

    index: int
    """Index of the entry in the batch."""
    reply: ReplyT | None = None
    error: ErrorBody | None = None
    receipt: str = ""
    """Spans that the request added to its trace, as in the header `x-trackway-trace`."""
