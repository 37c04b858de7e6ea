"""The version of a user's own code: a digest of its files, and the git commit of their folder."""

import hashlib
import importlib.util
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

from trackway.wire.health import OwnCode

_GIT_S = 5.0
"""Longest wait for git."""


def version_of(modules: Sequence[str], code_path: Path | None, files: Iterable[Path]) -> OwnCode | None:
    """The version of these modules, with all of their top-level packages, and of these files. None when there are none.

    A missing file is left out; loading it reports the error.
    """
    sources = {path: path.relative_to(root.parent) for root in roots_of(modules, code_path) for path in _python(root)}
    sources |= {path: Path(path.name) for path in files if path.is_file()}
    if not sources:
        return None
    digest = hashlib.sha256()
    for path, name in sorted(sources.items(), key=lambda source: str(source[1])):
        content = path.read_bytes()
        digest.update(f"{name} {len(content)}\n".encode())
        digest.update(content)
    folder = code_path or next(iter(sources)).parent
    named = sorted(str(name) for name in sources.values())
    return OwnCode(digest=digest.hexdigest()[:16], commit=_commit(folder), modules=[*modules], files=named[:100])


def roots_of(modules: Sequence[str], code_path: Path | None) -> list[Path]:
    """The package folder or the file of the top-level package of each module that can be found."""
    return [root for name in sorted({name.partition(".")[0] for name in modules}) if (root := _root(name, code_path))]


def _root(name: str, code_path: Path | None) -> Path | None:
    if code_path is not None:
        for candidate in (code_path / name, code_path / f"{name}.py"):
            if candidate.exists():
                return candidate
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    origin = Path(spec.origin)
    return origin.parent if origin.name == "__init__.py" else origin


def _python(root: Path) -> list[Path]:
    return [path for path in root.rglob("*.py") if path.is_file()] if root.is_dir() else [root]


def _commit(folder: Path) -> str:
    """The commit of the folder's git repository, with `+changes` when it has some. Empty without git."""
    try:
        commit = _git(folder, "rev-parse", "HEAD")
        return f"{commit}+changes" if _git(folder, "status", "--porcelain", "--", ".") else commit
    except (OSError, subprocess.SubprocessError):
        return ""


def _git(folder: Path, *words: str) -> str:
    command = ["git", "-C", str(folder), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_S, check=True)
    return done.stdout.strip()
