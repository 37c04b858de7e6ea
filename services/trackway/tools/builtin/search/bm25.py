"""The embedded retriever: BM25 over the passages of a folder, built once and kept in memory.

The folder's documents are .txt and .md files, split into passages, and .jsonl corpora with a passage per line.
"""

import hashlib
import logging
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import anyio.to_thread
import bm25s
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trackway.system import new_folder
from trackway.tools.user_files import problems_of
from trackway.wire.tools import RetrievedDocument, ScoredDocument

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


class EmbeddedRetriever:
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
