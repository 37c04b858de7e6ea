"""`search`: passages for the model's queries, from a folder of documents or a remote retriever.

Schema words, request and text follow verl v0.7.1's SearchTool (verl/tools/utils/search_r1_like_utils.py). No data
leaves this process unless `retrieval_service_url` is set.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, Self

from pydantic import AliasChoices, ConfigDict, Field, HttpUrl, JsonValue, SecretStr, ValidationError, model_validator

from trackway.clients import CallPolicy, Deadline, ServiceClient
from trackway.tools.base import BaseTool, ToolConfig, ToolInputError, ToolLimits
from trackway.tools.builtin.search.bm25 import CorpusLimits, EmbeddedRetriever
from trackway.tools.core.arguments import properties_of
from trackway.tools.user_files import problems_of
from trackway.wire.chat import FunctionSchema, ToolSchema
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.tools import MAX_QUERY_CHARS, MAX_TOPK, RetrieveReply, RetrieveRequest, ScoredDocument, ToolResult

_ATTEMPTS = 4


class RemoteRetriever:
    """Posts queries to `url`, with retries where they can help, within `timeout_s` in all.

    Only the given token is sent, none if it is empty: the retriever may belong to a third party.
    """

    def __init__(self, url: str, token: SecretStr, timeout_s: float, max_in_flight: int) -> None:
        self._url = url
        self._timeout_s = timeout_s
        policy = CallPolicy(read_s=timeout_s, total_s=timeout_s, attempts=_ATTEMPTS, max_in_flight=max_in_flight)
        self._client = ServiceClient(url, policy=policy, token=token)

    async def start(self) -> None:
        """Does nothing: the retriever may start later than this server."""
        return None

    async def retrieve(self, queries: Sequence[str], topk: int) -> list[list[ScoredDocument]]:
        """The documents of each query, one list per query."""
        request = RetrieveRequest(queries=[*queries], topk=topk, return_scores=True)
        try:
            reply = await self._client.call(
                "POST", "", reply=RetrieveReply, body=request, deadline=Deadline.after(self._timeout_s)
            )
        except TrackwayError as error:
            raise self._failure(error) from error
        if len(reply.result) != len(queries):
            message = f"search: expected {len(queries)} lists of documents from {self._url}, got {len(reply.result)}"
            raise TrackwayError(ErrorCode.TOOL_FAILED, f"{message}; check retrieval_service_url")
        return [[_scored(item) for item in documents] for documents in reply.result]

    def _failure(self, error: TrackwayError) -> TrackwayError:
        """An unreachable retriever is a transient error, a slow one a time-out. Its refusal means a wrong setting."""
        code = error.code if error.retryable else ErrorCode.TOOL_FAILED
        if error.code is ErrorCode.DEADLINE_EXCEEDED:
            code = ErrorCode.TOOL_TIMEOUT
        return TrackwayError(code, f"search: the retriever {self._url} did not answer: {error.message}", tool="search")


def _scored(item: object) -> ScoredDocument:
    return item if isinstance(item, ScoredDocument) else ScoredDocument.model_validate({"document": item})


MAX_CALL_QUERIES = 64
"""Maximum queries of a call."""
NOTHING_FOUND = "No search results found."


class Retriever(Protocol):
    """Finds documents."""

    async def start(self) -> None:
        """Prepare for queries. An exception says what is missing."""
        ...

    async def retrieve(self, queries: Sequence[str], topk: int) -> list[list[ScoredDocument]]:
        """The best documents of each query, best first."""
        ...


class SearchConfig(CorpusLimits):
    """`tool_config.search`: either `documents` or `retrieval_service_url`."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    documents: Path | None = None
    """Folder of .txt, .md and .jsonl files, read when the server starts."""
    index: Path | None = None
    """Folder in which the index is saved for the next start. It is rebuilt when a document changes."""
    retrieval_service_url: HttpUrl | None = None
    """URL of the retriever's POST route, usually `http://<host>:8000/retrieve`."""
    token: SecretStr = SecretStr("")
    """Bearer token for that retriever. TRACKWAY_TOKEN is not sent there."""
    topk: int = Field(default=3, ge=1, le=MAX_TOPK)
    """Documents per query."""
    timeout: float = Field(default=30.0, gt=0, validation_alias=AliasChoices("timeout", "default_timeout"))
    """Seconds for the retriever's response, retries included. `call_timeout_s` also applies."""
    num_workers: int = Field(default=120, ge=1)
    """Concurrent requests to the retriever; verl's name."""
    rate_limit: int = Field(default=120, ge=1)
    """Concurrent requests to the retriever if this is less than `num_workers`; verl's name."""
    enable_global_rate_limit: bool = True
    """True if `rate_limit` applies, to this replica; verl's name."""

    @property
    def max_in_flight(self) -> int:
        """Concurrent requests to the retriever."""
        return min(self.num_workers, self.rate_limit) if self.enable_global_rate_limit else self.num_workers

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.documents is not None and self.retrieval_service_url is not None:
            raise ValueError("expected either documents or retrieval_service_url, got both")
        if self.retrieval_service_url is not None and self.retrieval_service_url.password is not None:
            raise ValueError("expected a retrieval_service_url without a password; set token")
        return self

    def retriever(self) -> Retriever | None:
        """The retriever of the config, or None when it names none."""
        if self.documents is not None:
            return EmbeddedRetriever(self.documents, self.index, self)
        if self.retrieval_service_url is not None:
            return RemoteRetriever(str(self.retrieval_service_url), self.token, self.timeout, self.max_in_flight)
        return None


class SearchTool(BaseTool):
    """Searches for each query of a call; ValueError for a wrong config."""

    stateless = True
    path_keys = ("documents", "index")
    default_schema = ToolSchema(
        function=FunctionSchema(
            name="search",
            description="Searches for relevant information based on the given queries.",
            parameters={
                "type": "object",
                "properties": {
                    "query_list": {
                        "type": "array",
                        "items": {"type": "string"},
                        "minItems": 1,
                        "description": "A list of fully-formed semantic queries; there are results for each of them.",
                    }
                },
                "required": ["query_list"],
            },
        )
    )

    def __init__(self, config: ToolConfig, tool_schema: ToolSchema) -> None:
        super().__init__(config, tool_schema)
        self._config = _config(self.name, config)
        self._retriever = self._config.retriever()

    @property
    def embedded(self) -> bool:
        """Return whether the documents are local, so that `/retrieve` can offer them."""
        return isinstance(self._retriever, EmbeddedRetriever)

    async def start(self) -> None:
        """Index the documents. ValueError when neither source is configured."""
        if self._retriever is None:
            raise ValueError(
                f"{self.name}: expected documents (a folder) or retrieval_service_url, got neither; "
                f"set one of them in tool_config.{self.name}"
            )
        await self._retriever.start()

    def coerce(self, arguments: dict[str, JsonValue]) -> dict[str, JsonValue]:
        """Wraps a single query in a list, under either name that models write."""
        query = arguments.get("query", arguments.get("query_list"))
        takes_list = "query_list" in properties_of(self.tool_schema.function.parameters)
        return {"query_list": [query]} if takes_list and len(arguments) == 1 and isinstance(query, str) else arguments

    async def execute(
        self, instance_id: str, arguments: dict[str, JsonValue], /, **execute_kwargs: JsonValue
    ) -> ToolResult:
        """The documents of each query as text."""
        queries = _queries(arguments.get("query_list", arguments.get("query")))
        results = await self.retrieve(queries, None)
        metrics = {"query_count": float(len(queries)), "total_results": float(sum(map(len, results)))}
        return ToolResult(text=result_text(results), metrics=metrics)

    async def retrieve(self, queries: Sequence[str], topk: int | None) -> list[list[ScoredDocument]]:
        """The documents of each query; as many as configured when `topk` is None."""
        assert self._retriever is not None, "start comes first"
        return await self._retriever.retrieve(queries, topk or self._config.topk)


def result_text(results: Sequence[Sequence[ScoredDocument]]) -> str:
    """verl's text: JSON with one key, the queries' documents separated by a line of dashes."""
    if not any(results):
        return json.dumps({"result": NOTHING_FOUND})
    return json.dumps({"result": "\n---\n".join(map(_documents_text, results))}, ensure_ascii=False)


def _documents_text(documents: Sequence[ScoredDocument]) -> str:
    texts: list[str] = []
    for number, scored in enumerate(documents, start=1):
        title, _, text = scored.document.contents.partition("\n")
        texts.append(f"Doc {number} (Title: {title})\n{text}\n\n")
    return "".join(texts).strip() or NOTHING_FOUND


def _queries(query_list: JsonValue) -> list[str]:
    queries = [query_list] if isinstance(query_list, str) else query_list
    if not isinstance(queries, list) or not 1 <= len(queries) <= MAX_CALL_QUERIES:
        raise ToolInputError(f"search: expected query_list to be a list of 1 to {MAX_CALL_QUERIES} queries")
    texts = [query for query in queries if isinstance(query, str) and len(query) <= MAX_QUERY_CHARS]
    if len(texts) < len(queries):
        raise ToolInputError(f"search: expected each query to be a string of at most {MAX_QUERY_CHARS} characters")
    return texts


def _config(name: str, config: ToolConfig) -> SearchConfig:
    search = {key: value for key, value in config.items() if key not in ToolLimits.model_fields}
    try:
        return SearchConfig.model_validate(search)
    except ValidationError as error:
        raise ValueError(f"tool_config.{name}: {problems_of(error)}") from None
