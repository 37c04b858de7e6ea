"""Documents of a folder, split into passages: .txt and .md files, and .jsonl corpora with a passage per line."""

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trackway.tools.user_files import problems_of
from trackway.wire.search import RetrievedDocument

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
