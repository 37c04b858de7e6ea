"""Feedback on Weave calls, over the trace server's HTTP API.

A call's id is its span's id, so no look-up is needed. weave's client is not used because `weave.init` sets the
process's global OpenTelemetry provider and patches LLM libraries.
"""

import math
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import httpx
from pydantic import BaseModel, JsonValue, SecretStr, ValidationError

from trackway.system import atomic_write
from trackway.trainer.delivery.feedback_queue import Assessment, FeedbackQueue, Sent
from trackway.trainer.delivery.jobs import Later, only_sender
from trackway.wire.trainer import BackendSummary

ITEMS_PER_CALL = 1000
TIMEOUT_S = 30.0
NAME = "weave"
AWAY = (401, 403, 429, 502, 503, 504)
"""HTTP statuses after which a retry may succeed. 502 and 504 come from a gateway."""


class WeaveState(BaseModel):
    """The losses so far, and whether a post is unconfirmed; `weave.json` beside the queue."""

    lost: int = 0
    lost_because: str = ""
    waits_for: str = ""
    is_sending: bool = False
    """The oldest file may already be posted: the answer was lost, or the process was killed before it arrived."""


class FeedbackId(BaseModel):
    """A row stored by Weave."""

    id: str


class QueryAnswer(BaseModel):
    """The answer of `/feedback/query` to a query for ids."""

    result: list[FeedbackId]


class WeaveFeedback:
    """Feedback of one run for one Weave project; one request carries a whole step.

    Weave stores a second row for a repeated id, so a retry first queries the stored ids and posts only the others.
    """

    name = NAME

    def __init__(self, folder: Path, url: str, project: str, key: SecretStr) -> None:
        """`folder` holds the run's queues for its backends."""
        self.queue = FeedbackQueue(folder / f"{NAME}_feedback")
        self._folder = folder
        self._project = project
        self._url = f"{url.rstrip('/')}/feedback"
        self._http = httpx.Client(auth=("api", key.get_secret_value()), timeout=TIMEOUT_S)

    def advance(self) -> bool:
        """Send one file of the queue. Raises Later while Weave is unreachable or busy."""
        with only_sender(self._folder / f"{NAME}.lock"):
            before = read_state(self._folder)
            state = before.model_copy()
            dropped = self.queue.take_dropped()
            if dropped:
                state.lost, state.lost_because = state.lost + dropped, "no room on disk"
            sent = self.queue.send(lambda assessments: self._send_marked(assessments, before))
            state.is_sending = sent is not None and bool(sent.left)
            if sent is not None and sent.lost:
                state.lost, state.lost_because = state.lost + sent.lost, sent.reason
            state.waits_for = sent.reason if sent is not None and sent.is_away else ""
            if sent is not None or state != before:
                self._write(state)
        if state.waits_for:
            raise Later(state.waits_for)
        return sent is not None

    def summary(self) -> BackendSummary:
        """The counts of queued and lost values."""
        return weave_summary(self._folder)

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def _send_marked(self, assessments: list[Assessment], state: WeaveState) -> Sent:
        if not state.is_sending:
            self._write(state.model_copy(update={"is_sending": True}))
        return self._send(assessments, is_retry=state.is_sending)

    def _send(self, assessments: list[Assessment], is_retry: bool) -> Sent:
        left = list(assessments)
        lost, reason = 0, ""
        while left:
            part = _first(left, ITEMS_PER_CALL)
            items = list(self._items(part))
            try:
                if is_retry:
                    items = self._missing(items)
                if items:
                    self._post("batch/create", {"batch": items})
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                return Sent(left, lost, f"{self._url} cannot be reached: {error or type(error).__name__}", is_away=True)
            except (httpx.TransportError, ValidationError) as error:
                return Sent(left, lost, f"{self._url} gave no valid answer: {error}", is_away=True)
            except httpx.HTTPStatusError as error:
                refusal = _refusal(self._project, items, error.response)
                if error.response.status_code in AWAY:
                    return Sent(left, lost, refusal, is_away=True)
                lost, reason = lost + len(items), refusal
            left = left[len(part) :]
        return Sent([], lost, reason)

    def _missing(self, items: list[dict[str, JsonValue]]) -> list[dict[str, JsonValue]]:
        """The items whose ids are not stored in Weave."""
        ids = [{"$literal": item["id"]} for item in items]
        query = {"$expr": {"$in": [{"$getField": "id"}, ids]}}
        answer = self._post("query", {"project_id": self._project, "fields": ["id"], "query": query})
        stored = {row.id for row in QueryAnswer.model_validate_json(answer.content).result}
        return [item for item in items if item["id"] not in stored]

    def _post(self, route: str, body: Mapping[str, object]) -> httpx.Response:
        return self._http.post(f"{self._url}/{route}", json=body).raise_for_status()

    def _items(self, assessments: Sequence[Assessment]) -> Iterator[dict[str, JsonValue]]:
        for assessment in assessments:
            call = f"weave:///{self._project}/call/{assessment.span_id}"
            for name, value in assessment.values.items():
                is_number = isinstance(value, int | float) and math.isfinite(value)
                yield {
                    "id": str(uuid.uuid5(uuid.NAMESPACE_URL, f"{call}/feedback/{name}")),
                    "project_id": self._project,
                    "weave_ref": call,
                    "feedback_type": name,
                    "payload": {"value": value if is_number else str(value)},
                }

    def _write(self, state: WeaveState) -> None:
        atomic_write(self._folder / f"{NAME}.json", state.model_dump_json(indent=2))


def weave_summary(folder: Path) -> BackendSummary:
    """The counts of queued and lost values for Weave in a run's tracking folder."""
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
    """The stored state. The default state when the file is missing or damaged."""
    try:
        return WeaveState.model_validate_json((folder / f"{NAME}.json").read_text())
    except (OSError, ValueError):
        return WeaveState()


def _first(assessments: Sequence[Assessment], values: int) -> Sequence[Assessment]:
    """The longest prefix with at most `values` values, but at least one assessment."""
    count = 0
    for position, assessment in enumerate(assessments):
        count += len(assessment.values)
        if count > values and position:
            return assessments[:position]
    return assessments


def _refusal(project: str, items: Sequence[object], answer: httpx.Response) -> str:
    return f"Weave refused {len(items)} values for {project}: HTTP {answer.status_code}: {answer.text[:200]}"
