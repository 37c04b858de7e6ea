"""Looking for marks (stop strings, tool call tags) in text that comes in pieces."""

from collections.abc import Sequence


def begun(text: str, marks: Sequence[str]) -> int:
    """How many characters at the end of `text` may be the beginning of a mark."""
    sizes = (size for mark in marks for size in range(1, len(mark)) if text.endswith(mark[:size]))
    return max(sizes, default=0)


class StopStrings:
    """Passes text on up to the first stop string; what may be the beginning of one is held back."""

    def __init__(self, stops: Sequence[str], include: bool) -> None:
        self._stops, self._include = stops, include
        self._held = ""
        self.found = False

    def push(self, text: str) -> str:
        """The text that is certainly before the stop."""
        self._held += text
        hits = [(place, stop) for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if hits:
            self.found = True
            place, stop = min(hits)
            return self._held[: place + len(stop) * self._include]
        kept = len(self._held) - begun(self._held, self._stops)
        passed, self._held = self._held[:kept], self._held[kept:]
        return passed

    def rest(self) -> str:
        """What was held back and is no stop."""
        return "" if self.found else self._held
