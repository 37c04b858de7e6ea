"""Tinker's API on a port: a real rollout service of the tiny model, and runs that answer at once."""

import gc
import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tinker
from fastapi import FastAPI
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.services.trainer.tinker.executor import AnsweringRuns
from tests.serving import served_in_thread
from trackway.deploy.bundled import TINY_MODEL
from trackway.rollout.app import create_app as rollout_app
from trackway.rollout.settings import RolloutSettings
from trackway.serving import service_app
from trackway.tracing import Tracing, TracingSettings
from trackway.tracing import attributes as names
from trackway.trainer.settings import TrainerSettings
from trackway.trainer.tinker.routes import TinkerApi


@pytest.fixture(scope="module", autouse=True)
def sockets_of_the_sdk() -> Iterator[None]:
    """The SDK leaves its sockets to the garbage collector."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@dataclass
class Spans:
    """The spans of a service."""

    exporter: InMemorySpanExporter
    tracing: Tracing

    def named(self, name: str) -> list[Any]:
        """The spans of a name."""
        self.tracing.flush(5)
        return [span for span in self.exporter.get_finished_spans() if span.name == name]

    def chats(self) -> dict[str, tuple[str, str]]:
        """Trace and parent of each generation, in hex, by its seed."""
        self.tracing.flush(5)
        return {
            str((span.attributes or {})["gen_ai.request.seed"]): (
                format(span.context.trace_id, "032x"),
                format(span.parent.span_id, "016x"),
            )
            for span in self.exporter.get_finished_spans()
            if span.context is not None and span.parent is not None
        }

    def samples(self) -> dict[str, tuple[str, str | None, str]]:
        """Trace, parent and id of the span of each sample, by the sample's id."""
        self.tracing.flush(5)
        return {
            json.loads(str((span.attributes or {})[names.INPUTS]))["id"]: (
                format(span.context.trace_id, "032x"),
                format(span.parent.span_id, "016x") if span.parent else None,
                format(span.context.span_id, "016x"),
            )
            for span in self.exporter.get_finished_spans()
            if span.name == "sample" and span.context is not None
        }


def spans_of(service: str) -> Spans:
    exporter = InMemorySpanExporter()
    return Spans(exporter, Tracing(service, TracingSettings(mlflow_uri=None, weave_api_key=None), exporter))


@pytest.fixture(scope="session")
def spans() -> Spans:
    return spans_of("rollout")


@pytest.fixture(scope="session")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The rollout service's weight store."""
    return tmp_path_factory.mktemp("weights")


@pytest.fixture(scope="session")
def rollout_url(weights: Path, spans: Spans) -> Iterator[str]:
    settings = RolloutSettings(model_path=TINY_MODEL, weights_url=str(weights), device="cpu")
    with served_in_thread(rollout_app(settings, tracing=spans.tracing)) as url:
        yield url


@dataclass
class Api:
    """The service of an outputs folder, which a test stops and starts again."""

    outputs: Path
    rollout_url: str
    runs: AnsweringRuns
    spans: Spans

    @contextmanager
    def served(self, port: int = 0, **changes: Any) -> Iterator[str]:
        """Yield the base URL for the SDK."""
        settings = TrainerSettings(outputs_dir=str(self.outputs), rollout_url=self.rollout_url, **changes)
        with served_in_thread(app_of(settings, self.runs, self.spans.tracing), port) as url:
            yield url


def app_of(settings: TrainerSettings, runs: AnsweringRuns, tracing: Tracing | None = None) -> FastAPI:
    """A trainer service that has Tinker's routes alone."""
    tinker_api = TinkerApi(settings, runs)
    routers = [tinker_api.routes]
    return service_app("trainer", settings, routers=routers, lifespan=lambda _: tinker_api.running(), tracing=tracing)


@pytest.fixture
def api(tmp_path: Path, rollout_url: str) -> Api:
    return Api(tmp_path / "outputs", rollout_url, AnsweringRuns(tmp_path / "outputs"), spans_of("trainer"))


@pytest.fixture
def url(api: Api) -> Iterator[str]:
    with api.served() as url:
        yield url


@pytest.fixture
def client(url: str) -> Iterator[tinker.ServiceClient]:
    with tinker.ServiceClient(base_url=url, api_key="tml-any") as client:
        yield client
