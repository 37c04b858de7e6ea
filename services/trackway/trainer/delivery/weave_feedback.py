"""Feedback on Weave calls, over the trace server's own HTTP route.

A call's id is its span's id, so the reference needs no look-up. weave's client is not used: `weave.init` sets the
process's global OpenTelemetry provider and patches LLM libraries.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
from pydantic import BaseModel, JsonValue, SecretStr

from trackway.system import atomic_write
from trackway.trainer.delivery.assessment import Assessment
from trackway.trainer.delivery.feedback_queue import FeedbackQueue, Sent
from trackway.trainer.delivery.jobs import Later, only_sender
from trackway.wire.trainer import BackendSummary

ITEMS_PER_CALL = 1000
TIMEOUT_S = 30.0
NAME = "weave"


class WeaveState(BaseModel):
    """What was lost; `weave.json` beside the queue."""

    lost: int = 0
    lost_because: str = ""
    waits_for: str = ""


class WeaveFeedback:
    """Feedback of one run for one Weave project; one request holds a whole step.

    Only what surely did not arrive is sent again: Weave would keep it twice, as it does with what a process sent that
    was killed before it could say so.
    """

    name = NAME

    def __init__(self, folder: Path, url: str, project: str, key: SecretStr) -> None:
        """`folder` is where the run keeps what waits for its backends."""
        self.queue = FeedbackQueue(folder / f"{NAME}_feedback")
        self._folder = folder
        self._project = project
        self._url = f"{url.rstrip('/')}/feedback/batch/create"
        self._http = httpx.Client(auth=("api", key.get_secret_value()), timeout=TIMEOUT_S)

    def advance(self) -> bool:
        """Send one file of the queue. Raises Later while Weave cannot be reached, or is busy."""
        with only_sender(self._folder / f"{NAME}.lock"):
            before = read_state(self._folder)
            state = before.model_copy()
            dropped = self.queue.take_dropped()
            if dropped:
                state.lost, state.lost_because = state.lost + dropped, "no room on disk"
            sent = self.queue.send(self._send)
            if sent is not None and sent.lost:
                state.lost, state.lost_because = state.lost + sent.lost, sent.reason
            state.waits_for = sent.reason if sent is not None and sent.is_away else ""
            if state != before:
                atomic_write(self._folder / f"{NAME}.json", state.model_dump_json(indent=2))
        if state.waits_for:
            raise Later(state.waits_for)
        return sent is not None

    def summary(self) -> BackendSummary:
        """What waits, and what was lost."""
        return weave_summary(self._folder)

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def _send(self, assessments: list[Assessment]) -> Sent:
        left = list(assessments)
        lost, reason = 0, ""
        while left:
            part = _first(left, ITEMS_PER_CALL)
            items = list(self._items(part))
            try:
                answer = self._http.post(self._url, json={"batch": items})
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                return Sent(left, lost, f"{self._url} cannot be reached: {error or type(error).__name__}", is_away=True)
            except httpx.TransportError as error:
                lost, reason = lost + len(items), f"{self._url} did not answer, so they may have arrived: {error}"
            else:
                if answer.status_code in (401, 403, 429, 503):
                    return Sent(left, lost, _refusal(self._project, items, answer), is_away=True)
                if answer.is_error:
                    lost, reason = lost + len(items), _refusal(self._project, items, answer)
            left = left[len(part) :]
        return Sent([], lost, reason)

    def _items(self, assessments: Sequence[Assessment]) -> Iterator[JsonValue]:
        for one in assessments:
            for name, value in one.values.items():
                is_number = isinstance(value, int | float) and math.isfinite(value)
                yield {
                    "project_id": self._project,
                    "weave_ref": f"weave:///{self._project}/call/{one.span_id}",
                    "feedback_type": name,
                    "payload": {"value": value if is_number else str(value)},
                }


def weave_summary(folder: Path) -> BackendSummary:
    """What waits for Weave in a run's folder of such things, and what was lost."""
    state = read_state(folder)
    waiting = FeedbackQueue(folder / f"{NAME}_feedback").waiting
    return BackendSummary(
        backend=NAME,
        feedback_waiting=waiting,
        feedback_lost=state.lost,
        waits_for=state.waits_for,
        lost_because=state.lost_because,
    )


def read_state(folder: Path) -> WeaveState:
    """What was lost so far; nothing where the file is missing or damaged."""
    try:
        return WeaveState.model_validate_json((folder / f"{NAME}.json").read_text())
    except (OSError, ValueError):
        return WeaveState()


def _first(assessments: Sequence[Assessment], values: int) -> Sequence[Assessment]:
    """As many as have this many values together, and one at least."""
    taken = 0
    for number, one in enumerate(assessments):
        taken += len(one.values)
        if taken > values and number:
            return assessments[:number]
    return assessments


def _refusal(project: str, items: Sequence[JsonValue], answer: httpx.Response) -> str:
    return f"Weave refused {len(items)} values for {project}: HTTP {answer.status_code}: {answer.text[:200]}"
