"""A Hugging Face tokenizer without the Python around its Rust code, which costs much of the time for a short text."""

from typing import TYPE_CHECKING, Any

from pydantic import JsonValue

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RustTokenizer
    from transformers import PreTrainedTokenizerBase

_PYTHON = ("encode", "_encode_plus", "decode", "_decode")
"""Methods of transformers around the Rust code."""


class FastTokenizer:
    """Gives what the tokenizer gives; the tokenizer must not be changed afterwards."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer = tokenizer
        self._rust = _rust_alone(tokenizer)
        if self._rust is not None:  # as each call of transformers does
            self._rust.no_truncation()
            self._rust.no_padding()
            self._rust.encode_special_tokens = tokenizer.split_special_tokens
        self.chat_template: object = tokenizer.chat_template
        eos, unk = tokenizer.eos_token_id, tokenizer.unk_token_id
        self.eos_token_id = eos if isinstance(eos, int) else None
        self.unk_token_id = unk if isinstance(unk, int) else None

    def get_vocab(self) -> dict[str, int]:
        """Every token with its id."""
        return self._tokenizer.get_vocab()

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The ids of a text."""
        if self._rust is None:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        [encoding] = self._rust.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding.ids

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        """The text of ids."""
        if self._rust is None:
            return str(self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens))
        return self._rust.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self,
        conversation: list[dict[str, JsonValue]],
        tools: list[dict[str, JsonValue]] | None,
        *,
        add_generation_prompt: bool,
        tokenize: bool,
        **kwargs: Any,
    ) -> str:
        """The conversation as the model's chat template writes it."""
        rendered = self._tokenizer.apply_chat_template(
            conversation,  # pyright: ignore[reportArgumentType]  invariance of list in transformers' signature
            tools=tools,  # pyright: ignore[reportArgumentType]
            add_generation_prompt=add_generation_prompt,
            tokenize=tokenize,
            **kwargs,
        )
        return str(rendered)


def _rust_alone(tokenizer: "PreTrainedTokenizerBase") -> "RustTokenizer | None":
    """The Rust code when transformers adds nothing to what it does."""
    from transformers import PreTrainedTokenizerFast

    if not isinstance(tokenizer, PreTrainedTokenizerFast) or tokenizer.clean_up_tokenization_spaces:
        return None
    is_plain = all(getattr(type(tokenizer), name) is getattr(PreTrainedTokenizerFast, name) for name in _PYTHON)
    return tokenizer.backend_tokenizer if is_plain else None
