"""The exit status of a command, however it ends."""

import json
import logging
import signal
import sys
from collections.abc import Iterator
from typing import Annotated

import pytest
import typer

from trackway.deploy.terminal.entry import enter
from trackway.system.process import UserError
from trackway.wire.errors import ErrorCode, TrackwayError


@pytest.fixture(autouse=True)
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The command line of the test, and what `enter` changes in its process put back."""
    monkeypatch.setattr(sys, "argv", ["trackway"])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    handler, factory = signal.getsignal(signal.SIGTERM), logging.getLogRecordFactory()
    yield
    signal.signal(signal.SIGTERM, handler)
    logging.setLogRecordFactory(factory)


@pytest.mark.parametrize(
    ("end", "status"),
    [
        (None, 0),
        (typer.Exit(0), 0),
        (typer.Exit(1), 1),
        (typer.Exit(7), 7),
        (typer.BadParameter("expected a number"), 2),
        (UserError("expected a run, got none"), 2),
        (TrackwayError(ErrorCode.UNAVAILABLE, "expected a service, got none"), 2),
        (KeyboardInterrupt(), 130),
    ],
    ids=lambda value: value if isinstance(value, int) else repr(value),
)
def test_a_command_ends_with_the_exit_status_of_how_it_ended(end: BaseException | None, status: int) -> None:
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

    @app.command()
    def command() -> None:
        if end is not None:
            raise end

    with pytest.raises(SystemExit) as caught:
        enter(app)
    assert caught.value.code == status


def test_a_command_that_is_told_to_end_is_interrupted() -> None:
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

    @app.command()
    def command() -> None:
        signal.raise_signal(signal.SIGTERM)
        raise AssertionError("the signal did not interrupt the command")

    with pytest.raises(SystemExit) as caught:
        enter(app)
    assert caught.value.code == 130


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (UserError("expected a run, got none"), "invalid_request", "expected a run, got none"),
        (TrackwayError(ErrorCode.UNAVAILABLE, "no service"), "unavailable", "no service"),
        (RuntimeError("a defect"), "internal", "RuntimeError: a defect"),
    ],
    ids=repr,
)
def test_every_error_is_one_json_document_with_json(
    error: Exception, code: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["trackway", "--json"])
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

    @app.command()
    def command(as_json: Annotated[bool, typer.Option("--json")] = False) -> None:
        raise error

    with pytest.raises((SystemExit, RuntimeError)):
        enter(app)
    body = json.loads(capsys.readouterr().out)["error"]
    assert (body["code"], body["message"]) == (code, message)
