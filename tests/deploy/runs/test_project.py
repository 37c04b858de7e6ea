"""A project: a folder with `trackway.yaml`, whose paths are relative to it."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from trackway.deploy.checks.run import Subject
from trackway.deploy.commands.training import app
from trackway.deploy.config import serve_config
from trackway.deploy.config.services_for_run import services_for
from trackway.deploy.deployment.record import Deployment
from trackway.deploy.local.settings import UpSettings
from trackway.deploy.runs.prepare import configured, prepare, project_file
from trackway.run_config import compose
from trackway.system.process import UserError
from trackway.trainer.run_state.folder import RunFolder
from trackway.trainer.service_urls import ServiceUrls
from trackway.wire.errors import TrackwayError
from trackway.wire.trainer import RunState

pytestmark = pytest.mark.slow

TURNS = {"tool_config_path": "tools.yaml", "function_tool_path": "tools.py", "format": "mine"}
AGENT = {"agent_loop_config_path": "loops.yaml"}
CONFIG = {
    "trackway": {"modules": ["my_agent"]},
    "data": {"train_files": "data/rows.jsonl", "val_files": ["/data/test.jsonl"]},
    "actor_rollout_ref": {"model": {"path": "model"}, "rollout": {"multi_turn": TURNS, "agent": AGENT}},
    "custom_reward_function": {"path": "rewards.py", "reward_kwargs": {"share": 0.5}},
}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "project"
    (folder / "model").mkdir(parents=True)
    (folder / "trackway.yaml").write_text(yaml.safe_dump(CONFIG))
    monkeypatch.chdir(tmp_path)
    before = [*sys.path]
    yield folder
    sys.path[:] = before


def test_the_working_folders_file_is_taken_only_when_no_configuration_is_named(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert project_file(None) is None

    monkeypatch.chdir(project)

    assert project_file(None) == Path("trackway.yaml")
    assert project_file(None, "tiny_demo") is None
    assert project_file(Path("elsewhere/other.yaml")) == Path("elsewhere/other.yaml")
    assert project_file(project) is None


def test_paths_of_the_file_are_relative_to_it_and_those_of_the_command_line_to_the_working_folder(
    project: Path, tmp_path: Path
) -> None:
    config = configured(
        ["+data.val_files=mine.jsonl", "trainer.experiment_name=two"], project / "trackway.yaml", "default"
    )

    turns = config.actor_rollout_ref.rollout.multi_turn
    assert config.data.train_files == [f"{project}/data/rows.jsonl"]
    assert config.data.val_files == [f"{tmp_path}/mine.jsonl"]
    assert config.actor_rollout_ref.model.path == f"{project}/model"
    assert (turns.tool_config_path, turns.function_tool_path) == (f"{project}/tools.yaml", f"{project}/tools.py")
    assert config.custom_reward_function.path == f"{project}/rewards.py"
    assert config.actor_rollout_ref.rollout.agent.agent_loop_config_path == f"{project}/loops.yaml"
    assert (config.trackway.code_path, config.trainer.experiment_name) == (str(project), "two")


def test_a_code_path_of_the_file_is_kept(project: Path) -> None:
    config = configured(["trackway.code_path=src"], project / "trackway.yaml", "default")

    assert config.trackway.code_path == f"{Path.cwd()}/src"


def test_a_file_of_another_name_is_a_projects_file_too(project: Path) -> None:
    (project / "big.yaml").write_text(yaml.safe_dump({**CONFIG, "trackway": {"seed": 1}}))

    config = configured([], project / "big.yaml", "default")

    assert config.data.train_files == [f"{project}/data/rows.jsonl"]
    assert config.custom_reward_function.path == f"{project}/rewards.py"
    assert config.trackway.code_path == str(project)


def test_a_file_of_a_folder_is_hydras_whose_paths_are_relative_to_the_working_folder(
    project: Path, tmp_path: Path
) -> None:
    config = configured([], project, "trackway")

    assert config.data.train_files == [f"{tmp_path}/data/rows.jsonl"]
    assert config.trackway.code_path is None


def test_rows_that_are_read_here_keep_their_paths_when_services_run_elsewhere(project: Path, tmp_path: Path) -> None:
    there = Deployment(base_url="http://there", dashboard_url="", mlflow_uri="", outputs=tmp_path, attached=True)
    file = project / "trackway.yaml"
    file.write_text(yaml.safe_dump({"data": {"train_files": "rows.jsonl", "val_files": "held_out.jsonl"}}))

    typed = configured(["data.val_files=[mine.jsonl]"], file, "default", there, trial=True)
    others = configured([], file, "default", there, trial=True)

    assert (typed.data.train_files, typed.data.val_files) == ([f"{project}/rows.jsonl"], [f"{tmp_path}/mine.jsonl"])
    assert (others.data.train_files, others.data.val_files) == ([f"{project}/rows.jsonl"], [])
    assert others.trackway.code_path is None


def test_services_elsewhere_get_no_path_of_this_machine(project: Path, tmp_path: Path) -> None:
    there = Deployment(base_url="http://there", dashboard_url="", mlflow_uri="", outputs=tmp_path, attached=True)

    with pytest.raises(UserError, match=r"data\.train_files: expected an absolute path on the services' volume"):
        configured([], project / "trackway.yaml", "default", there)


def test_a_run_with_services_of_its_own_resumes_with_its_own_settings_and_changes_of_the_command_line(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project)
    file, settings = Path("trackway.yaml"), UpSettings(outputs=Path("outputs"))
    seqs = "actor_rollout_ref.rollout.max_num_seqs"
    keys = ["trackway.learner_ranks=2", "trackway.seed=7", f"{seqs}=9", "trainer.resume_mode=disable"]
    began = prepare(["trainer.experiment_name=run", *keys], file, "default", settings).config
    folder = RunFolder(Path("outputs").resolve() / "run")
    folder.create(began, ServiceUrls(agent_url="http://a", tools_url="http://t", weights_url="w"))
    for state in (RunState.RUNNING, RunState.STOPPING, RunState.STOPPED):
        folder.move(state)
    file.write_text(yaml.safe_dump({**CONFIG, "trackway": {"modules": ["my_agent"], "seed": 8}}))

    def again(*words: str) -> Subject:
        run = prepare([*words], None, "default", settings, resume="run")
        assert run.services is not None
        assert serve_config.args_of(run.services.serve_config, "rollout")["max_num_seqs"] == 9
        assert (run.resumes, run.occupied) == ("run run", "")
        return run

    assert again().config == began
    now = again("trackway.learner_ranks=null")
    kept = now.config.trackway
    assert (kept.learner_ranks, kept.seed, kept.code_path) == (None, 7, str(project))
    assert now.changes == {"trackway.learner_ranks": None}
    with pytest.raises(TrackwayError, match=r"^trackway\.seed: expected no other value for a resumed run"):
        again("trackway.seed=3")


def test_the_services_of_a_project_get_its_modules_loops_tools_and_its_scorer(project: Path) -> None:
    config = configured([], project / "trackway.yaml", "default")

    services = services_for(config, 0, serve_config.load(UpSettings.read().config))

    for service in ("agent", "tools", "reward"):
        args = serve_config.args_of(services.serve_config, service)
        assert (args["modules"], args["code_path"]) == (["my_agent"], str(project))
    function = {"path": f"{project}/rewards.py", "name": "compute_score", "reward_kwargs": {"share": 0.5}}
    assert serve_config.args_of(services.serve_config, "reward")["custom_reward_function"] == function
    agent, tools = (serve_config.args_of(services.serve_config, service) for service in ("agent", "tools"))
    assert (agent["agent_loop_config_path"], agent["tool_parser"]) == (f"{project}/loops.yaml", "mine")
    assert (tools["tool_config_path"], tools["function_tool_path"]) == (f"{project}/tools.yaml", f"{project}/tools.py")
    rollout = serve_config.args_of(services.serve_config, "rollout")
    assert "modules" not in rollout and "tool_parser" not in rollout


def test_a_built_in_tool_format_reaches_agent_and_rollout() -> None:
    config = compose(["actor_rollout_ref.rollout.multi_turn.format=mistral", "actor_rollout_ref.model.path=x"])

    services = services_for(config, 0, serve_config.load(UpSettings.read().config))

    got = [serve_config.args_of(services.serve_config, service)["tool_parser"] for service in ("agent", "rollout")]
    assert got == ["mistral", "mistral"]


def test_a_project_folder_that_does_not_exist_is_missing_here(project: Path) -> None:
    config = configured(["trackway.code_path=gone"], project / "trackway.yaml", "default")

    missing = services_for(config, 0, serve_config.load(UpSettings.read().config)).not_found

    assert f"trackway.code_path: expected a folder, got {Path.cwd()}/gone; correct the path" in missing


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"my_agent.py": "\n1 / 0\n"}, "setting modules, 'my_agent': ZeroDivisionError: division by zero ("),
        ({"my_agent.py": "def f(:"}, "setting modules, 'my_agent': SyntaxError: invalid syntax (my_agent.py, line 1)"),
        ({}, "setting modules, 'my_agent': ModuleNotFoundError: No module named 'my_agent'"),
        ({"my_agent.py": ""}, "custom_reward_function.path: expected a Python file, got "),
        ({"my_agent.py": "", "rewards.py": "x = 1"}, "which has none, got 'compute_score'; correct the name"),
        ({"my_agent.py": "", "rewards.py": "\nimport nothing_of_the_kind"}, "rewards.py:2)"),
        ({"my_agent.py": ""}, "agent_loop_config_path: expected a YAML file, got "),
        ({"my_agent.py": "", "loops.yaml": "[]"}, "tool_parser: expected one of ['hermes', 'llama3'"),
    ],
)
def test_a_dry_run_names_what_cannot_be_loaded(
    project: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], message: str
) -> None:
    monkeypatch.chdir(project)
    monkeypatch.delitem(sys.modules, "my_agent", raising=False)
    for name, text in files.items():
        (project / name).write_text(text)

    told = CliRunner().invoke(app, ["train", "--dry-run"], env={"COLUMNS": "400", "CUDA_VISIBLE_DEVICES": ""})

    assert message in " ".join(told.stdout.split())
    sys.modules.pop("my_agent", None)
