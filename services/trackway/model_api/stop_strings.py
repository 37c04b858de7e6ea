"""Finds stop strings in streamed text."""

from collections.abc import Sequence

from trackway.chat.call_reader import begun


class StopStrings:
    """Passes text up to the first stop string; a possible start of one is held back."""

    def __init__(self, stops: Sequence[str], include: bool) -> None:
        self._stops, self._include = stops, include
        self._held = ""
        self.found: str | None = None
        """The stop string."""

    def push(self, text: str) -> str:
        """The text that is known to precede the stop string."""
        self._held += text
        hits = [(place, stop) for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if hits:
            place, stop = min(hits)
            self.found = stop
            return self._held[: place + len(stop) * self._include]
        kept = len(self._held) - begun(self._held, self._stops)
        passed, self._held = self._held[:kept], self._held[kept:]
        return passed

    def rest(self) -> str:
        """Text that was held back and is not a stop string."""
        return "" if self.found is not None else self._held
