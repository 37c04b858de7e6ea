"""`trackway init`: what it writes, and what it refuses."""

import ast
import json
from pathlib import Path

import pytest

from trackway.deploy.commands.new_project import templates, write_project
from trackway.run_config import compose
from trackway.system.process import UserError
from trackway.trainer.data.row_files import read_rows

pytestmark = pytest.mark.slow


def test_the_templates_are_those_of_the_documentation() -> None:
    assert templates() == ["calculator", "gsm8k-tool", "python", "search"]


@pytest.mark.parametrize("template", templates())
def test_a_project_is_under_ten_small_files_with_its_own_name_in_all(template: str, tmp_path: Path) -> None:
    folder = tmp_path / "math-tutor"

    files = write_project(folder, template)

    assert len(files) < 10 and sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file()) == files
    texts = {str(file): (folder / file).read_text() for file in files}
    assert all(len(text) < 20_000 for text in texts.values())
    assert [name for name, text in texts.items() if "my_agent" in name + text or "my-agent" in name + text] == []
    assert {".gitignore", "README.md", "reward.py", "test_math_tutor.py"} < texts.keys()
    for name, text in texts.items():
        if name.endswith(".py"):
            ast.parse(text)


@pytest.mark.parametrize("template", templates())
def test_a_project_is_a_configuration_and_rows_that_are_valid(template: str, tmp_path: Path) -> None:
    folder = tmp_path / "math-tutor"
    write_project(folder, template)

    config = compose([], folder / "trackway.yaml")

    assert config.trainer.project_name == "math-tutor"
    assert config.trackway.ignored_keys == (["data.return_raw_chat"] if template == "gsm8k-tool" else [])
    assert (config.custom_reward_function.path, config.custom_reward_function.name) == ("reward.py", "compute_score")
    for file in [*config.data.train_files, *config.data.val_files]:
        rows = read_rows(folder / file)
        assert len(rows) >= config.data.train_batch_size or file in config.data.val_files
        loop = "math_tutor" if template == "calculator" else "tool_agent"
        assert {row.agent_name for row in rows} == {loop}
        assert [row.index for row in rows] == list(range(len(rows)))


def test_held_out_prompts_are_none_of_the_training_prompts(tmp_path: Path) -> None:
    for template in templates():
        write_project(tmp_path / template, template)
        train, held_out = (
            {
                json.loads(line)["prompt"][-1]["content"]
                for line in (tmp_path / template / name).read_text().splitlines()
            }
            for name in ("rows.jsonl", "held_out.jsonl")
        )
        assert not train & held_out


def test_a_folder_with_files_is_left_as_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "math-tutor"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")

    with pytest.raises(UserError, match="math-tutor: expected a new or empty folder, got a folder with files"):
        write_project(folder, "calculator")

    assert [path.name for path in folder.iterdir()] == ["notes.txt"]


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    (tmp_path / "tutor").mkdir()

    assert Path("tutor.py") in write_project(tmp_path / "tutor", "calculator")


@pytest.mark.parametrize("name", ["My Agent", "9lives", "a.b", "-x", "a--b", "x" * 65, "größe"])
def test_a_name_that_cannot_name_a_module_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"small letters, digits, - and _ that begins with a letter"):
        write_project(tmp_path / name, "calculator")
    assert not (tmp_path / name).exists()


@pytest.mark.parametrize("name", ["json", "class", "reward", "torch", "trackway"])
def test_a_name_that_a_module_has_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"expected a name that no Python module has, got '{name}'"):
        write_project(tmp_path / name, "calculator")


@pytest.mark.parametrize("template", ["gsm8k", "common", "../search"])
def test_an_unknown_template_is_refused_with_the_known_ones(template: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--from: expected one of calculator, gsm8k-tool, python, search, got"):
        write_project(tmp_path / "tutor", template)
