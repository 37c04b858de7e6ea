"""`trackway init`: a project of one's own."""

import keyword
import re
import sys
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Annotated

import typer

from trackway.deploy.bundled import PROJECTS
from trackway.deploy.commands.options import json_of
from trackway.deploy.terminal.progress import print_json, stdout
from trackway.system import atomic_write, writing
from trackway.system.process import UserError

NAME = re.compile(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*")
MAX_NAME = 64
_COMMON = "common"


def templates() -> list[str]:
    """Names of the templates."""
    return sorted(folder.name for folder in PROJECTS.iterdir() if folder.is_dir() and folder.name != _COMMON)


def write_project(folder: Path, template: str) -> list[Path]:
    """Write a template's project into a new or empty folder, which gives it its name. Returns the files in it.

    Raises:
        UserError: an unknown template, an unusable name, or a folder that is not empty; nothing is written.
    """
    if template not in templates():
        raise UserError(f"--from: expected one of {', '.join(templates())}, got {template!r}; choose one of them")
    folder = folder.expanduser().resolve()
    name, module = _names(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        got = "a folder with files" if folder.is_dir() else "a file"
        raise UserError(f"{folder}: expected a new or empty folder, got {got}; give another name")
    what = f"the project {name}"
    with writing(folder, what):
        folder.mkdir(parents=True, exist_ok=True)
    files: list[Path] = []
    for part in (PROJECTS / _COMMON, PROJECTS / template):
        for source in part.rglob("*"):
            if not source.is_file() or source.parent.name == "__pycache__":
                continue
            file = source.relative_to(part).with_name(
                ".gitignore" if source.name == "gitignore" else source.name.replace("my_agent", module)
            )
            (folder / file).parent.mkdir(exist_ok=True)
            text = source.read_text().replace("my_agent", module).replace("my-agent", name)
            atomic_write(folder / file, text, what=what)
            files.append(file)
    return sorted(files)


def _names(folder: Path) -> tuple[str, str]:
    """Return the names of the project and its Python module. Raises UserError if either cannot be used."""
    name = folder.name
    module = name.replace("-", "_")
    if len(name) > MAX_NAME or not NAME.fullmatch(name):
        raise UserError(
            f"expected a name of at most {MAX_NAME} small letters, digits, - and _ that begins with a letter, such as "
            f"my-agent, got {name!r}; give another"
        )
    taken = {"tool", "reward", "trackway", *sys.stdlib_module_names, *packages_distributions()}
    if keyword.iskeyword(module) or module in taken:
        raise UserError(f"expected a name that no Python module has, got {name!r}; give another, such as my-{name}")
    return name, module


app = typer.Typer()


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(help="New folder; its name is the project's.")],
    template: Annotated[
        str, typer.Option("--from", help=f"What to begin with: {', '.join(templates())}.")
    ] = "calculator",
    as_json: Annotated[bool, json_of("the folder and the names of its files")] = False,
) -> None:
    """Write a project: rows, a tool, a reward function, an agent loop, a configuration and a test.

    `trackway try rows.jsonl` and `trackway train` work in the folder at once. The tiny model earns rewards with
    `calculator` alone. The others need a model of yours.

    Example: trackway init my-agent
    """
    files = [str(file) for file in write_project(folder, template)]
    if as_json:
        print_json({"folder": str(folder.expanduser().resolve()), "from": template, "files": files})
        return
    stdout.print(f"{folder} has {', '.join(files)}", soft_wrap=True, highlight=False)
    for line in (f"cd {folder}", "trackway try rows.jsonl", "trackway train"):
        stdout.print(f"  {line}", soft_wrap=True, highlight=False)
    if template != "calculator":
        note = "the tiny model's rewards are 0 here: set actor_rollout_ref.model.path in trackway.yaml for a real run"
        stdout.print(note, soft_wrap=True, highlight=False)
