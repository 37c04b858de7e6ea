"""A remote retriever with the API of search-agent recipes."""

from collections.abc import Sequence

from pydantic import SecretStr

from trackway.clients import CallPolicy, Deadline, ServiceClient
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.search import RetrieveReply, RetrieveRequest, ScoredDocument

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
        """An unreachable retriever is a transient error, a slow one a time-out; its refusal means a wrong setting."""
        code = error.code if error.retryable else ErrorCode.TOOL_FAILED
        if error.code is ErrorCode.DEADLINE_EXCEEDED:
            code = ErrorCode.TOOL_TIMEOUT
        return TrackwayError(code, f"search: the retriever {self._url} did not answer: {error.message}", tool="search")


def _scored(item: object) -> ScoredDocument:
    return item if isinstance(item, ScoredDocument) else ScoredDocument.model_validate({"document": item})
