"""The output of a call, truncated while it is read."""

import codecs


class BoundedOutput:
    """Keeps the first and the last characters, with a marker for the number of omitted ones."""

    def __init__(self, max_chars: int) -> None:
        self._half = max_chars // 2
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._head = ""
        self._tail = ""
        self._chars = 0
        self.bytes_read = 0

    def feed(self, data: bytes) -> None:
        """Add the next bytes of UTF-8 text. They may end within a character."""
        self.bytes_read += len(data)
        text = self._decoder.decode(data)
        room = self._half - len(self._head)
        self._head += text[:room]
        self._tail = (self._tail + text[room:])[-self._half :]
        self._chars += len(text)

    def text(self) -> str:
        """The kept text, with the marker if something is omitted."""
        left_out = self._chars - len(self._head) - len(self._tail)
        marker = f"\n[... {left_out} characters left out ...]\n" if left_out else ""
        return f"{self._head}{marker}{self._tail}"
