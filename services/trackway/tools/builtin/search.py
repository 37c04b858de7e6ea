"""`search`: passages for the model's queries, from a folder of documents (BM25) or a retriever behind HTTP.

Schema words, request and text follow verl v0.7.1's SearchTool (verl/tools/utils/search_r1_like_utils.py). No data
leaves this process unless `retrieval_service_url` is set.

The folder's documents are .txt and .md files, split into passages, and .jsonl corpora with a passage per line. Their
index is built once and kept in memory.
"""

import hashlib
import json
import logging
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol, Self

import anyio.to_thread
import bm25s
from pydantic import (
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    HttpUrl,
    JsonValue,
    SecretStr,
    ValidationError,
    model_validator,
)

from trackway.clients import CallPolicy, Deadline, ServiceClient
from trackway.system import new_folder
from trackway.tools.base import BaseTool, ToolConfig, ToolInputError, ToolLimits
from trackway.tools.core.limits import properties_of
from trackway.tools.settings import problems_of
from trackway.wire.chat import FunctionSchema, ToolSchema
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.tools import (
    MAX_QUERY_CHARS,
    MAX_TOPK,
    RetrievedDocument,
    RetrieveReply,
    RetrieveRequest,
    ScoredDocument,
    ToolResult,
)

SUFFIXES = (".jsonl", ".md", ".txt")
_BLANK_LINES = re.compile(r"\n\s*\n")


class Passage(NamedTuple):
    """A passage. The first line of `contents` is the title in quotes, as in search-agent corpora."""

    id: str
    contents: str


class CorpusLimits(BaseModel):
    """Limits of a folder, and the length of passages."""

    model_config = ConfigDict(frozen=True)

    max_files: int = Field(default=10_000, ge=1)
    """Maximum files. More are an error."""
    max_bytes: int = Field(default=512 * 1024 * 1024, ge=1)
    """Maximum bytes of all files. More are an error: use a retriever service for such a corpus."""
    passage_chars: int = Field(default=1200, ge=100)
    """Maximum characters of a passage of a .txt or .md file, split at blank lines where possible."""


@dataclass(frozen=True)
class Corpus:
    """The passages of a folder in the order of its paths. The digest changes with any of them."""

    passages: list[Passage]
    digest: str
    files: int
    bytes: int


def read_folder(folder: Path, limits: CorpusLimits) -> Corpus:
    """Read every document below the folder. ValueError names the file, what was expected and the remedy."""
    paths = _paths(folder, limits)
    digest = hashlib.sha256(f"passages of {limits.passage_chars}".encode())
    passages: list[Passage] = []
    size = 0
    for path in paths:
        content = path.read_bytes()
        name = path.relative_to(folder).as_posix()
        size += len(content)
        digest.update(f"\n{name} {len(content)}\n".encode() + content)
        passages.extend(_passages(path, name, content, limits.passage_chars))
    if not passages:
        raise ValueError(f"documents: expected passages in {folder}, got none in {len(paths)} files of {SUFFIXES}")
    return Corpus(passages, digest.hexdigest(), len(paths), size)


def _paths(folder: Path, limits: CorpusLimits) -> list[Path]:
    if not folder.is_dir():
        raise ValueError(f"documents: expected a folder, got {str(folder)!r}")
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())
    if len(paths) > limits.max_files:
        raise ValueError(
            f"documents: expected at most {limits.max_files} files in {folder}, got {len(paths)}; raise max_files"
        )
    size = sum(path.stat().st_size for path in paths)
    if size > limits.max_bytes:
        raise ValueError(
            f"documents: expected at most {limits.max_bytes} bytes in {folder}, got {size}; raise max_bytes, or serve "
            "the corpus by a separate retriever and set retrieval_service_url"
        )
    return paths


def _passages(path: Path, name: str, content: bytes, max_chars: int) -> Iterator[Passage]:
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: expected UTF-8, got {error}; convert the file") from error
    if path.suffix.lower() == ".jsonl":
        yield from _lines(path, name, text)
        return
    title, body = _titled(path, text.strip())
    for number, passage in enumerate(cut(body, max_chars)):
        yield Passage(f"{name}#{number}", f'"{title}"\n{passage}')


def _lines(path: Path, name: str, text: str) -> Iterator[Passage]:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            document = RetrievedDocument.model_validate_json(line)
        except ValidationError as error:
            raise ValueError(
                f'{path}, line {number}: {problems_of(error)}; expected {{"contents": ...}} or '
                '{"title": ..., "text": ...}'
            ) from None
        yield Passage(str(document.id) or f"{name}#{number}", document.contents)


def _titled(path: Path, text: str) -> tuple[str, str]:
    """The first line if it is a heading, else the file's name; and the text below it."""
    first, _, rest = text.partition("\n")
    return (first[2:].strip(), rest) if first.startswith("# ") else (path.stem, text)


def cut(text: str, max_chars: int) -> Iterator[str]:
    """Splits a text into passages: as many paragraphs as fit, a longer paragraph at spaces."""
    passage = ""
    for piece in _pieces(text, max_chars):
        if passage and len(passage) + 2 + len(piece) > max_chars:
            yield passage
            passage = piece
        else:
            passage = f"{passage}\n\n{piece}" if passage else piece
    if passage:
        yield passage


def _pieces(text: str, max_chars: int) -> Iterator[str]:
    for paragraph in _BLANK_LINES.split(text):
        rest = paragraph.strip()
        while len(rest) > max_chars:
            end = rest.rfind(" ", 1, max_chars + 1)
            end = max_chars if end < 0 else end
            yield rest[:end].rstrip()
            rest = rest[end:].lstrip()
        if rest:
            yield rest


logger = logging.getLogger("trackway.tools")
logging.getLogger("bm25s").setLevel(logging.WARNING)  # bm25s sets its own logger to DEBUG

_SLICE = 64
"""Queries between two points at which the request can be cancelled."""
_UNSPACED = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7a3"
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W{_UNSPACED}]+")
"""A word, or a character of a script without spaces between words."""
_FORMAT = f"bm25s-{bm25s.__version__}-1"


def words(text: str) -> list[str]:
    """The searchable words of a text."""
    return _WORD.findall(text.lower())


class PassageIndex:
    """Passages with the BM25 scores of their words. ValueError when no passage has a word."""

    def __init__(self, passages: Sequence[Passage], scorer: bm25s.BM25) -> None:
        self._passages = passages
        self._scorer = scorer

    @classmethod
    def build(cls, corpus: Corpus) -> "PassageIndex":
        """Score every word of every passage."""
        word_ids: dict[str, int] = {}
        split = [
            [word_ids.setdefault(word, len(word_ids)) for word in words(passage.contents)]
            for passage in corpus.passages
        ]
        if not word_ids:
            raise ValueError(f"documents: expected words in {len(split)} passages, got none")
        scorer = bm25s.BM25()
        scorer.index((split, word_ids), show_progress=False)
        return cls(corpus.passages, scorer)

    @classmethod
    def load(cls, corpus: Corpus, folder: Path) -> "PassageIndex | None":
        """The saved index of exactly these passages, or None when there is no usable one."""
        saved = folder / _name(corpus)
        if not saved.is_dir():
            return None
        try:
            scorer = bm25s.BM25.load(saved)
        except (OSError, EOFError, ValueError, KeyError) as error:
            logger.warning("search: the index in %s cannot be read (%s); rebuilding it", saved, error)
            return None
        return cls(corpus.passages, scorer)

    def save(self, corpus: Corpus, folder: Path) -> None:
        """Save the index for the next start. Replicas may do so concurrently."""
        saved = folder / _name(corpus)
        try:
            with new_folder(saved) as draft:
                self._scorer.save(draft, show_progress=False)
                shutil.rmtree(saved, ignore_errors=True)
        except OSError as error:
            logger.warning("search: the index was not saved in %s: %s", saved, error)

    def search(self, query: str, topk: int) -> list[ScoredDocument]:
        """The best passages, best first, without those that have no word of the query."""
        asked = [word for word in words(query) if word in self._scorer.vocab_dict]
        if not asked:
            return []
        count = min(topk, len(self._passages))
        passage_ids, scores = self._scorer.retrieve([asked], k=count, show_progress=False, backend_selection="numpy")
        return [
            ScoredDocument(document=_document(self._passages[passage_id]), score=round(float(score), 6))
            for passage_id, score in zip(passage_ids[0], scores[0], strict=True)
            if score > 0
        ]


class _EmbeddedRetriever:
    """Searches its own index. Reading and searching run in threads."""

    def __init__(self, documents: Path, index: Path | None, limits: CorpusLimits) -> None:
        self._documents = documents
        self._saved = index
        self._limits = limits
        self._index: PassageIndex | None = None

    async def start(self) -> None:
        """Read the documents, and load or build their index. ValueError when they cannot be used."""
        self._index = await anyio.to_thread.run_sync(self._made)

    async def retrieve(self, queries: Sequence[str], topk: int) -> list[list[ScoredDocument]]:
        """The best passages of each query."""
        index = self._index
        assert index is not None, "start comes first"

        def answers(some: Sequence[str]) -> list[list[ScoredDocument]]:
            return [index.search(query, topk) for query in some]

        results: list[list[ScoredDocument]] = []
        for start in range(0, len(queries), _SLICE):
            results += await anyio.to_thread.run_sync(answers, queries[start : start + _SLICE])
        return results

    def _made(self) -> PassageIndex:
        began = time.monotonic()
        corpus = read_folder(self._documents, self._limits)
        what = f"{len(corpus.passages)} passages of {corpus.files} files ({corpus.bytes} bytes)"
        logger.info("search: read %s in %s; indexing", what, self._documents)
        index = PassageIndex.load(corpus, self._saved) if self._saved else None
        how = "loaded"
        if index is None:
            index, how = PassageIndex.build(corpus), "built"
            if self._saved:
                index.save(corpus, self._saved)
        logger.info("search: %s the index of %s in %.1f s", how, what, time.monotonic() - began)
        return index


def _name(corpus: Corpus) -> str:
    return f"{_FORMAT}-{corpus.digest[:32]}"


def _document(passage: Passage) -> RetrievedDocument:
    return RetrievedDocument(id=passage.id, contents=passage.contents)


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
            return _EmbeddedRetriever(self.documents, self.index, self)
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
        return isinstance(self._retriever, _EmbeddedRetriever)

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
