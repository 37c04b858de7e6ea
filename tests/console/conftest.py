"""A console that is served, and one Chromium for all tests."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.console.browser import Browser
from tests.console.example_run import HOSTILE, rollout, write_run, write_values
from tests.serving import served_in_thread
from trackway.console.app import create_app
from trackway.trainer.run_state.trajectories import write_trajectories

Serve = Callable[..., str]


@pytest.fixture(scope="session")
def serve() -> Iterator[Serve]:
    """Serves `create_app` of these arguments until the session ends; returns its URL."""
    with contextlib.ExitStack() as started:

        def serve(outputs: Path, **options: Any) -> str:
            return started.enter_context(served_in_thread(create_app(outputs, **options), lifespan="on")) + "/"

        yield serve


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture
def browser(chromium: Browser) -> Browser:
    """At an empty page of 1280 px, with nothing remembered of the tests before."""
    chromium.call("Page.navigate", url="about:blank")
    chromium.wait("location.href === 'about:blank'")
    chromium.size(1280)
    chromium.requests.clear()
    chromium.problems.clear()
    return chromium


@pytest.fixture
def outputs(tmp_path: Path) -> Path:
    folder = write_run(tmp_path / "outputs", message=HOSTILE)
    write_values(folder, 2)
    write_trajectories(
        folder.path / "trajectories/step_3.parquet", [rollout("tidy", 3, 1, n, text=HOSTILE) for n in (0, 1)]
    )
    return tmp_path / "outputs"


@pytest.fixture
def url(outputs: Path, serve: Serve) -> str:
    return serve(outputs)
