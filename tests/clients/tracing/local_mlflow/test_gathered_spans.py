"""Spans of several requests in one transaction of MLflow's store."""

import asyncio
from dataclasses import dataclass

import pytest

from trackway.tracing.local_mlflow import gathered_spans
from trackway.tracing.local_mlflow.gathered_spans import GatheredSpans

pytestmark = pytest.mark.anyio


@dataclass(frozen=True)
class Span:
    trace_id: str
    span_id: str
    parent_id: str | None = None


ROOT, CHILD = Span("t1", "root"), Span("t1", "child", "root")
OTHER, OTHER_CHILD = Span("t2", "root"), Span("t2", "child", "root")


class Store:
    """MLflow's store; refuses these spans."""

    def __init__(self, *refused: Span) -> None:
        self.calls: list[tuple[str, list[Span]]] = []
        self._refused = refused

    def log_spans(self, location: str, spans: list[Span]) -> list[Span]:
        self.calls.append((location, spans))
        if set(spans) & set(self._refused):
            raise ValueError("no such span")
        return spans


async def logged(store: Store, *calls: tuple[str, list[Span]]) -> list[object]:
    """What each of these concurrent requests gets."""
    gathered = GatheredSpans(store.log_spans)
    async with asyncio.timeout(30):
        return await asyncio.gather(*(gathered.log(*call) for call in calls), return_exceptions=True)


async def test_a_child_waits_for_its_root(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gathered_spans, "GATHER_S", 60.0)
    store = Store()

    answers = await logged(store, ("1", [CHILD]), ("1", [ROOT]))

    assert (answers, store.calls) == ([[CHILD], [ROOT]], [("1", [CHILD, ROOT])])


async def test_a_root_that_stays_away_delays_its_children_a_moment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gathered_spans, "GATHER_S", 0.05)
    store = Store()

    answers = await logged(store, ("1", [CHILD]))

    assert (answers, store.calls) == ([[CHILD]], [("1", [CHILD])])


async def test_experiments_are_stored_apart(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gathered_spans, "GATHER_S", 60.0)
    store = Store()

    await logged(store, ("1", [CHILD]), ("2", [OTHER]), ("1", [ROOT]))

    assert store.calls == [("1", [CHILD, ROOT]), ("2", [OTHER])]


async def test_spans_that_the_store_refuses_fail_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gathered_spans, "GATHER_S", 60.0)
    store = Store(OTHER_CHILD)

    answers = await logged(store, ("1", [ROOT]), ("1", [OTHER_CHILD]), ("1", [OTHER]))

    assert [str(answer) for answer in answers] == [str([ROOT]), "no such span", str([OTHER])]


async def test_a_transaction_holds_a_bounded_number_of_traces(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gathered_spans, "MAX_TRACES", 1)
    store = Store()

    await logged(store, ("1", [ROOT]), ("1", [CHILD]), ("1", [OTHER]))

    assert store.calls == [("1", [ROOT, CHILD]), ("1", [OTHER])]
