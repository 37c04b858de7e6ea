"""Incremental detokenization: the pieces joined equal the text of all ids decoded at once."""

from collections.abc import Callable, Sequence

Decode = Callable[[list[int]], str]

_BROKEN = "\ufffd"


class Detokenizer:
    """Returns text once it is final: a character with incomplete bytes waits for the next token.

    A token's text may depend on the preceding ones (a leading space, the bytes of a character), so new ids are decoded
    together with those of the last returned text; vLLM and TGI do the same.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._ids: list[int] = []
        """The ids of the last returned text, and the pending ones."""
        self._given_ids = 0
        self._given = ""
        """Text of the first `_given_ids` ids."""

    def push(self, ids: Sequence[int]) -> str:
        """The text that these ids complete."""
        self._ids += ids
        text = self._decode(self._ids)
        if text.endswith(_BROKEN) or len(text) <= len(self._given):
            return ""
        new = text[len(self._given) :]
        del self._ids[: self._given_ids]
        self._given_ids, self._given = len(self._ids), self._decode(self._ids)
        return new

    def rest(self) -> str:
        """Incomplete characters at the end, as replacement characters."""
        return self._decode(self._ids)[len(self._given) :]
