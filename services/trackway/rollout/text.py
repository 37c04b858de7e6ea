"""Token ids as text, for traces only: the tokenizer is loaded when the first span wants text."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, cast


class _Decodes(Protocol):
    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...


class TokenText:
    """Decodes with special tokens kept, so that a trace shows what the model really saw and wrote."""

    def __init__(self, model_path: Path) -> None:
        self._model_path = model_path
        self._tokenizer: _Decodes | None = None
        self._loading = asyncio.Lock()

    async def decode(self, token_ids: Sequence[int]) -> str:
        """The text of the ids."""
        tokenizer = self._tokenizer or await self._load()
        return tokenizer.decode(list(token_ids), skip_special_tokens=False)

    async def _load(self) -> _Decodes:
        async with self._loading:
            if self._tokenizer is None:
                self._tokenizer = await asyncio.to_thread(_load_tokenizer, self._model_path)
            return self._tokenizer


def _load_tokenizer(model_path: Path) -> _Decodes:
    # Seconds to import, and only a traced request needs it.
    from transformers import AutoTokenizer

    return cast(_Decodes, AutoTokenizer.from_pretrained(model_path, local_files_only=True))
