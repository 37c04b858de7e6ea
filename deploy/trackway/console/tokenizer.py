"""The text of token ids, by the tokenizer of the run's model where it lies on this machine."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trackway.trainer.run_state.folder import RunFolder

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_MOST = 4
"""Tokenizers kept in memory."""


class Tokenizers:
    """Loads `tokenizer.json` of the folder `actor_rollout_ref.model.path`; nothing is downloaded."""

    def __init__(self) -> None:
        self._loaded: dict[Path, Tokenizer | None] = {}

    def pieces(self, folder: RunFolder, ids: Sequence[int]) -> list[str] | None:
        """The text of each token; None without a tokenizer or without the package `tokenizers`."""
        path = _path(folder)
        if path is None:
            return None
        if path not in self._loaded:
            if len(self._loaded) >= _MOST:
                self._loaded.clear()
            self._loaded[path] = _load(path)
        tokenizer = self._loaded[path]
        if tokenizer is None:
            return None
        return [tokenizer.decode([token], skip_special_tokens=False) for token in ids]


def _path(folder: RunFolder) -> Path | None:
    # RunFolder.config() needs Hydra, which the console does without.
    try:
        config = json.loads((folder.path / "config.json").read_bytes())
        path = Path(config["actor_rollout_ref"]["model"]["path"]) / "tokenizer.json"
        return path if path.is_file() else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _load(path: Path) -> "Tokenizer | None":
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError:
        return None
    try:
        return Tokenizer.from_file(str(path))
    except Exception:  # what a damaged file raises is a bare Exception
        return None
