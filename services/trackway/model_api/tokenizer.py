"""What this package needs of a tokenizer."""

from typing import Protocol

from pydantic import JsonValue


class Tokenizer(Protocol):
    """The methods in use of a Hugging Face tokenizer."""

    chat_template: object
    eos_token_id: int | None
    unk_token_id: int | None

    def get_vocab(self) -> dict[str, int]: ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...

    def apply_chat_template(
        self,
        conversation: list[dict[str, JsonValue]],
        tools: list[dict[str, JsonValue]] | None,
        *,
        add_generation_prompt: bool,
        tokenize: bool,
        **kwargs: JsonValue,
    ) -> str: ...
