"""Feedback on Weave calls, over the trace server's own HTTP route.

A call's id is its span's id, so the reference needs no look-up. weave's client is not used: `weave.init` sets the
process's global OpenTelemetry provider and patches LLM libraries.
"""

from collections.abc import Iterator, Sequence

import httpx
from pydantic import JsonValue, SecretStr

from trackway.trainer.background import Background, NotYet
from trackway.trainer.feedback import Assessment

ITEMS_PER_CALL = 1000
TIMEOUT_S = 10.0


class WeaveFeedback:
    """Feedback of one Weave project; one request holds a whole step."""

    def __init__(self, url: str, project: str, key: SecretStr, background: Background, patience_s: float) -> None:
        self._project = project
        self._background = background
        self._patience_s = patience_s
        self._url = f"{url.rstrip('/')}/feedback/batch/create"
        self._http = httpx.Client(auth=("api", key.get_secret_value()), timeout=TIMEOUT_S)

    def submit(self, assessments: Sequence[Assessment]) -> None:
        """Queue the values of a step. Only what surely did not arrive is sent again: Weave would keep it twice."""
        items = list(self._items(assessments))
        for start in range(0, len(items), ITEMS_PER_CALL):
            part = items[start : start + ITEMS_PER_CALL]
            self._background.submit(lambda part=part: self._send(part), self._patience_s)

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def _items(self, assessments: Sequence[Assessment]) -> Iterator[JsonValue]:
        for one in assessments:
            for name, value in one.values.items():
                yield {
                    "project_id": self._project,
                    "weave_ref": f"weave:///{self._project}/call/{one.span_id}",
                    "feedback_type": name,
                    "payload": {"value": value},
                }

    def _send(self, items: list[JsonValue]) -> None:
        try:
            answer = self._http.post(self._url, json={"batch": items})
        except httpx.ConnectError as error:
            raise NotYet(f"{self._url} cannot be reached: {error}") from error
        if answer.is_error:
            message = f"Weave refused {len(items)} values for {self._project}: HTTP {answer.status_code}: "
            raise RuntimeError(message + answer.text[:200])
