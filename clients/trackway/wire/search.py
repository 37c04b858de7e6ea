"""The retriever API that search-agent recipes call: `POST /retrieve`."""

from typing import Annotated

from pydantic import BeforeValidator, Field, JsonValue, StrictBool, model_validator

from trackway.wire.base import WireReply, WireRequest

MAX_QUERIES = 4096
"""Most queries of one request. Recipes send the queries of a whole batch of trajectories."""
MAX_QUERY_CHARS = 8192
MAX_TOPK = 100


def _no_bool_or_text(value: object) -> object:
    if isinstance(value, bool | str):
        raise ValueError("Input should be a valid integer")
    return value


class RetrieveRequest(WireRequest):
    """Find documents for each query."""

    queries: list[Annotated[str, Field(max_length=MAX_QUERY_CHARS)]] = Field(max_length=MAX_QUERIES, fail_fast=True)
    topk: Annotated[int, Field(ge=1, le=MAX_TOPK), BeforeValidator(_no_bool_or_text)] | None = None
    """Documents per query. None takes the server's default."""
    return_scores: StrictBool = False
    """Return each document with its score: `{"document": ..., "score": ...}`."""


class RetrievedDocument(WireReply):
    """One document. The first line of `contents` is its title in quotes."""

    id: str | int = ""
    contents: str

    @model_validator(mode="before")
    @classmethod
    def _from_title_and_text(cls, document: JsonValue) -> JsonValue:
        """Corpora have `contents`, or `text` and usually a `title`."""
        if not isinstance(document, dict) or "contents" in document or "text" not in document:
            return document
        title = document.get("title", document.get("id", ""))
        return {**document, "contents": f'"{title}"\n{document["text"]}'}


class ScoredDocument(WireReply):
    """A document and its score. Higher is better."""

    document: RetrievedDocument
    score: float = 0.0


class RetrieveReply(WireReply):
    """One list per query, best first; with scores if requested."""

    result: list[list[ScoredDocument | RetrievedDocument]]
