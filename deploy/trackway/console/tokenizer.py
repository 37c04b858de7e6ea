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
_BEFORE = 8
"""Tokens before the shown ones that are decoded with them, as a character may begin there."""


class Tokenizers:
    """Loads `tokenizer.json` of the folder `actor_rollout_ref.model.path`. Nothing is downloaded."""

    def __init__(self) -> None:
        self._loaded: dict[Path, Tokenizer | None] = {}

    def pieces(self, folder: RunFolder, ids: Sequence[int], shown: range) -> list[str] | None:
        """The text that each of the shown tokens adds, or None without a tokenizer or without the package `tokenizers`.

        A token that ends within a character adds nothing, and the one that completes it adds the character.
        """
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
        from tokenizers.decoders import DecodeStream

        stream, start = DecodeStream(skip_special_tokens=False), max(0, shown.start - _BEFORE)
        pieces = [stream.step(tokenizer, token) or "" for token in ids[start : shown.stop]]
        return pieces[shown.start - start :]


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
