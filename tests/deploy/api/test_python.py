"""`import trackway`: its names, and an evaluation with functions of this process."""

import asyncio
import inspect
import operator
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import trackway
from trackway.deploy.api.services import _with_functions, _without_functions
from trackway.deploy.bundled import CPU_CONFIG, TINY_MODEL
from trackway.deploy.config import serve_config
from trackway.deploy.deployment.record import Deployment
from trackway.deploy.runs.session import RunSession
from trackway.evaluation.store import EvaluationStore
from trackway.run_config.compose import given
from trackway.system.process import UserError
from trackway.trainer.data.row_files import read_rows
from trackway.trainer.run_state.folder import RunFolder

ROWS = [
    {"prompt": f"Ben has {a} boxes with {b} cards in each box. How many cards does Ben have?", "answer": a * b}
    for a, b in ((10, 11), (3, 8), (7, 6), (12, 4))
]
OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.floordiv}


def calculator(expression: str) -> str:
    """Calculate with two whole numbers.

    Args:
        expression: A number, one of + - * /, and a number, such as 12-5.
    """
    match = re.fullmatch(r"\s*(\d+)\s*([-+*/])\s*(\d+)\s*", expression)
    if match is None:
        raise ValueError(f"expected two whole numbers and one of + - * /, got {expression!r}")
    return str(OPERATIONS[match[2]](int(match[1]), int(match[3])))


def score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None) -> float:
    return float(solution_str.rpartition("####")[2].strip() == ground_truth)


def test_the_package_offers_its_names_and_imports_neither_torch_nor_ray():
    code = "import sys, trackway; print(*dir(trackway)); print({'torch', 'ray', 'pydantic'} & {*sys.modules})"

    names, heavy = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    ).stdout.splitlines()

    assert names == "Evaluated Run Services connect evaluate local rollout train"
    assert heavy == "set()"


def test_every_name_is_there_and_another_is_an_attribute_error():
    for name in trackway.__all__:
        assert callable(getattr(trackway, name))
    with pytest.raises(AttributeError, match="module 'trackway' has no attribute 'trian'"):
        trackway.trian  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]


def test_the_function_rollout_and_the_package_of_the_rollout_service_share_their_name():
    code = (
        "import trackway.rollout.settings as settings, inspect, trackway\n"
        "print(settings.RolloutSettings is trackway.rollout.settings.RolloutSettings)\n"
        "print([*inspect.signature(trackway.rollout).parameters][:3])\n"
        "trackway.rollout()"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)

    assert done.stdout.splitlines() == ["True", "['what', 'rows', 'n']"]
    assert "TypeError: rollout() missing 2 required positional arguments: 'what' and 'rows'" in done.stderr


@pytest.mark.parametrize("name", ["train", "evaluate", "rollout"])
def test_a_function_has_the_parameters_of_its_method_and_the_outputs_folder(name: str):
    own, method = (inspect.signature(getattr(place, name)).parameters for place in (trackway, trackway.Services))
    passed_on = {key: parameter for key, parameter in own.items() if key not in ("outputs", "options")}

    assert own["outputs"].default == "outputs"
    assert name != "train" or passed_on.keys() == method.keys() - {"self"}
    taken = method if "options" not in method else inspect.signature(trackway.Services.evaluate).parameters
    assert {key: taken[key].default for key in passed_on if key != "rows"} == {
        key: parameter.default for key, parameter in passed_on.items() if key != "rows"
    }


@pytest.mark.slow
def test_functions_of_this_process_are_the_tools_and_the_reward_of_an_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)

    async def notebook() -> trackway.Evaluated:  # whose cells have a running event loop
        return trackway.evaluate(
            TINY_MODEL, ROWS, tools=[calculator], reward=score, n=4, config="tiny_demo", run="mine"
        )

    result = asyncio.run(notebook())

    trajectories = EvaluationStore(tmp_path / "outputs" / "mine").trajectories()
    calls = [call for trajectory in trajectories for turn in trajectory.turns for call in turn.calls]
    assert {call.tool for call in calls if call.error is None} == {"calculator"}
    frame = result.trajectories()
    assert len(frame) == 16
    assert result.score == pytest.approx(frame.score.mean())
    assert result.summary.failed == 0 and "pass@4" in repr(result)
    compared = result.against(result)
    assert compared is not None and compared.score.value == 0.0
    assert [*(tmp_path / "outputs" / ".deployment").iterdir()] == []
    assert [tool.function.name for tool in RunFolder(tmp_path / "outputs" / "mine").tools()] == ["calculator"]


class Prepared(Exception):
    """Ends a call with the overrides of its run."""


@pytest.fixture
def keys_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., dict[str, object]]:
    """The keys of the run that a call of `train` would start."""

    def prepare(words: list[str], *rest: object) -> None:
        raise Prepared(words)

    def keys(**arguments: object) -> dict[str, object]:
        with pytest.raises(Prepared) as prepared:
            trackway.local(tmp_path).train(**arguments)  # pyright: ignore[reportArgumentType]
        return dict(given(prepared.value.args[0]))

    monkeypatch.setattr("trackway.deploy.api.services.prepare", prepare)
    return keys


def test_the_demos_preset_brings_rows(keys_of: Callable[..., dict[str, object]], tmp_path: Path):
    folder = tmp_path / "rows" / "tiny-seed0"

    keys = keys_of(config="tiny_demo", run="mine")

    files = [keys["data.train_files"], keys["data.val_files"]]
    assert files == [str(folder / "train.parquet"), str(folder / "test.parquet")]
    assert [len(read_rows(Path(str(file)))) for file in files] == [2000, 256]
    assert keys["trainer.experiment_name"] == "mine"


def test_rows_and_keys_go_before_the_demos_rows(keys_of: Callable[..., dict[str, object]], tmp_path: Path):
    assert keys_of(config="tiny_demo", rows="a.jsonl")["data.train_files"] == ["a.jsonl"]
    assert keys_of(config="tiny_demo", data={"train_files": "b.jsonl"})["data.train_files"] == "b.jsonl"
    assert keys_of(config="tiny_demo", held_out="c.jsonl")["data.val_files"] == ["c.jsonl"]
    assert keys_of() == {"trainer.experiment_name": "run-1"}


def test_services_elsewhere_get_neither_functions_nor_rows(tmp_path: Path):
    Deployment(base_url="http://127.0.0.1:9", dashboard_url="", mlflow_uri="", outputs=tmp_path, attached=True).save()
    services = trackway.local(tmp_path)

    with pytest.raises(UserError, match=r"expected no functions, since the services run elsewhere .* trackway.modules"):
        services.evaluate("running", "/data/rows.jsonl", tools=[calculator])
    with pytest.raises(UserError, match="rows: expected a path on the services' volume"):
        services.train(ROWS)
    with pytest.raises(UserError, match="rows: expected a path on the services' volume"):
        services.train(config="tiny_demo")


def test_an_active_run_keeps_its_functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    here = Deployment(base_url="http://127.0.0.1:9", dashboard_url="", mlflow_uri="", outputs=tmp_path)
    monkeypatch.setattr("trackway.deploy.api.services.recorded", lambda outputs: here)
    monkeypatch.setattr(RunSession, "active", lambda session: ["other"])

    with pytest.raises(UserError, match="expected services without another run, got other, whose tools and reward"):
        trackway.local(tmp_path).train(ROWS, tools=[calculator], run="mine")

    assert not list(tmp_path.glob(".deployment/functions-*"))


def test_services_that_another_run_was_given_are_left_alone_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = _with_functions(serve_config.load(CPU_CONFIG), tmp_path / "functions-other.json")
    here = Deployment(
        base_url="http://127.0.0.1:9", dashboard_url="", mlflow_uri="", outputs=tmp_path, serve_config=config
    )
    monkeypatch.setattr("trackway.deploy.api.services.recorded", lambda outputs: here)
    reloaded: list[object] = []
    monkeypatch.setattr("trackway.deploy.api.services.reload", lambda *words: reloaded.append(words[-1]))

    trackway.local(tmp_path)._take(tmp_path / "functions-mine.json")
    trackway.local(tmp_path)._take(tmp_path / "functions-other.json")

    assert reloaded == [_without_functions(config, tmp_path / "functions-other.json")]


def test_only_the_functions_of_the_file_are_taken_away():
    before = serve_config.with_options(serve_config.load(CPU_CONFIG), "tools", {"tools": ["calculator"]})
    given = _with_functions(before, Path("/one.json"))

    assert given != before
    assert _without_functions(given, Path("/other.json")) == given
    assert _without_functions(given, Path("/one.json")) == before
