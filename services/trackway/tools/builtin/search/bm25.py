"""The embedded retriever: BM25 over the passages of a folder, built once and kept in memory."""

import logging
import re
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import anyio.to_thread
import bm25s

from trackway.system import new_folder
from trackway.tools.builtin.search.documents import Corpus, CorpusLimits, Passage, read_folder
from trackway.wire.search import RetrievedDocument, ScoredDocument

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
