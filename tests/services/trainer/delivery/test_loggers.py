"""`trainer.logger`: which names there are, what each needs, and TensorBoard's files."""

import math
from importlib.util import find_spec
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from trackway.run_config import compose, no_effect
from trackway.trainer.delivery import ConsoleSink, Sink, Tracking, check_loggers, open_tracking
from trackway.trainer.delivery.opening import PACKAGES
from trackway.trainer.run_state.folder import RunFolder
from trackway.trainer.service_urls import ServiceUrls
from trackway.trainer.undelivered import sentences
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.trainer import MetricsRow

pytestmark = pytest.mark.slow

VALUE = "val-core/openai/gsm8k/acc/mean@1"


def test_an_unknown_logger_is_an_error_that_names_the_known_ones():
    with pytest.raises(TrackwayError, match="expected loggers from console, file, mlflow, tensorboard, wandb, got wb"):
        compose(["trainer.logger=[console,wb]"])


@pytest.mark.parametrize("name", ["swanlab", "vemlp_wandb", "clearml", "rl_insight", "trackio"])
def test_verls_other_loggers_are_told_as_without_effect(name: str):
    told = dict(no_effect(compose([f"trainer.logger=[console,{name}]"]).trackway.ignored_keys))

    reason = "there is no such logger here; the loggers are console, file, mlflow, tensorboard, wandb"
    assert told == {f"trainer.logger.{name}": reason}


@pytest.mark.parametrize("name", PACKAGES)
def test_a_logger_whose_package_is_missing_is_refused_with_the_extra_that_installs_it(
    name: str, monkeypatch: pytest.MonkeyPatch
):
    found = find_spec  # the real one, for all but the package that is taken away
    monkeypatch.setattr(
        "trackway.trainer.delivery.opening.find_spec", lambda wanted: None if wanted == name else found(wanted)
    )
    config = compose([f"trainer.logger=[console,{name}]"])

    with pytest.raises(
        TrackwayError, match=rf"trainer.logger: .* {name} .*found none; pip install 'trackway\[{name}\]'"
    ):
        check_loggers(config, "http://mlflow")
    check_loggers(compose(["trainer.logger=[console]"]), None)


def test_a_folder_of_the_packages_name_is_not_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "swimming").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("trackway.trainer.delivery.opening.PACKAGES", ("file", "swimming"))
    (tmp_path / "file").mkdir()

    with pytest.raises(TrackwayError, match="found none"):
        check_loggers(compose(["trainer.logger=file"]), None)


@pytest.mark.parametrize(
    ("override", "default"),
    [("trackway.mlflow_uri=http://mlflow", None), ("trackway.mlflow_uri=null", "http://mlflow")],
)
def test_mlflow_by_name_needs_a_uri(override: str, default: str | None):
    with pytest.raises(TrackwayError, match=r"URI for mlflow, got none; set trackway.mlflow_uri") as no:
        check_loggers(compose(["trainer.logger=[console,mlflow]"]), None)

    check_loggers(compose(["trainer.logger=[console,mlflow]", override]), default)
    assert no.value.code is ErrorCode.INVALID_REQUEST


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.create(compose([]), ServiceUrls(agent_url="http://a", tools_url="http://t", weights_url="/w"))
    return folder


def tensorboard(folder: RunFolder) -> tuple[Tracking, Sink]:
    tracking = open_tracking(folder, compose(["trainer.logger=tensorboard"]), None)
    [sink] = tracking.backends
    return tracking, sink


def shown(folder: Path) -> list[tuple[int, float]]:
    events = EventAccumulator(str(folder))
    events.Reload()
    return [(point.step, point.value) for point in events.Scalars(VALUE)]


def row(step: int, value: float) -> MetricsRow:
    return MetricsRow(step=step, data={VALUE: value})


def test_tensorboard_has_every_row_under_its_exact_name(folder: RunFolder):
    tracking, sink = tensorboard(folder)
    for step, value in ((0, 0.25), (20, 0.5)):
        sink.log(row(step, value))
    tracking.close("FINISHED", 30.0)

    assert shown(folder.path / "tensorboard") == [(0, 0.25), (20, 0.5)]


def test_tensorboard_and_the_console_show_what_is_not_finite(folder: RunFolder, capsys: pytest.CaptureFixture[str]):
    tracking, sink = tensorboard(folder)
    for step, value in ((1, math.nan), (2, math.inf), (3, 0.5)):
        sink.log(row(step, value))
    tracking.close("FINISHED", 30.0)
    ConsoleSink().log(MetricsRow(step=1, data={"grad_norm": math.nan, "score": -math.inf}))

    assert repr(shown(folder.path / "tensorboard")) == "[(1, nan), (2, inf), (3, 0.5)]"
    assert capsys.readouterr().out == "step:1 - grad_norm:nan - score:-inf\n"


def test_steps_that_a_resumed_run_does_again_supersede_the_earlier_ones(folder: RunFolder):
    first, sink = tensorboard(folder)
    for step in (1, 2, 3):
        sink.log(row(step, 0.0))
    first.close("KILLED", 30.0)

    again, sink = tensorboard(folder)
    again.catch_up([row(1, 0.5), row(2, 0.5)])
    sink.log(row(3, 0.5))
    again.close("FINISHED", 30.0)

    assert shown(folder.path / "tensorboard") == [(1, 0.5), (2, 0.5), (3, 0.5)]


def test_the_variable_says_where_the_event_files_lie(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path / "elsewhere"))
    tracking, sink = tensorboard(folder)
    sink.log(row(1, 1.0))
    tracking.close("FINISHED", 30.0)

    assert shown(tmp_path / "elsewhere") == [(1, 1.0)]
    assert not (folder.path / "tensorboard").exists()


def test_a_folder_that_cannot_be_written_costs_rows_and_not_the_run(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    (folder.path / "file").touch()
    monkeypatch.setenv("TENSORBOARD_DIR", str(folder.path / "file" / "below"))
    tracking, sink = tensorboard(folder)
    sink.log(row(1, 1.0))
    [summary] = tracking.close("FINISHED", 30.0)

    assert "tensorboard: 1 jobs failed, 0 were dropped" in caplog.text
    assert (summary.backend, summary.metrics_lost) == ("tensorboard", 1)
    assert sentences(summary)[0].startswith("1 value of metrics lost for TensorBoard: ")
