"""The model's tokenizer, loaded at the first use."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from trackway.chat.tokenizer import ChatTokenizer
from trackway.serving.user_code import in_thread
from trackway.wire.errors import ErrorCode, TrackwayError


class TokenText:
    """The tokenizer of a model folder."""

    def __init__(self, model_path: Path, tool_parser: str | None = None) -> None:
        self.model_path = model_path
        self._tool_parser = tool_parser
        self._tokenizer: ChatTokenizer | None = None
        self._loading = asyncio.Lock()

    async def decode(self, token_ids: Sequence[int]) -> str:
        """The text of the ids with special tokens, so that traces show the exact tokens."""
        tokenizer = await self.tokenizer()
        return tokenizer.decode(list(token_ids), skip_special_tokens=False)

    async def required(self) -> ChatTokenizer:
        """The tokenizer itself. Raises INTERNAL when the folder lacks one."""
        try:
            return await self.tokenizer()
        except Exception as error:
            # transformers raises OSError, ValueError, KeyError or ImportError for a folder it cannot use.
            message = f"expected a tokenizer in {self.model_path}, got {type(error).__name__}: {error}; "
            remedy = "add one, or send token ids to /inference/v1/generate"
            raise TrackwayError(ErrorCode.INTERNAL, message + remedy) from error

    async def tokenizer(self) -> ChatTokenizer:
        """The tokenizer itself, loaded once. Raises transformers' error when the folder lacks one."""
        if self._tokenizer is None:
            async with self._loading:
                if self._tokenizer is None:
                    # Also when cancelled, it waits for the thread: two imports at a time may fail.
                    self._tokenizer = await in_thread(lambda: _load_tokenizer(self.model_path, self._tool_parser))
        return self._tokenizer


def _load_tokenizer(model_path: Path, tool_parser: str | None) -> ChatTokenizer:
    # The import takes seconds, and not every replica needs it.
    from transformers import AutoTokenizer

    return ChatTokenizer(AutoTokenizer.from_pretrained(model_path, local_files_only=True), tool_parser)
