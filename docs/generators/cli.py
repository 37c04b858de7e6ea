"""The page of the command line."""

import re

import typer
from typer.cli import get_docs_for_click
from typer.main import get_command

from generators.markdown import page
from trackway.deploy import cli
from trackway.main_ppo import app as main_ppo


def command_line() -> str:
    """Every command with its arguments and options, by Typer's own generator."""
    return page(
        "Command line",
        "`trackway COMMAND --help` prints the same.",
        _documented(cli.app, "trackway"),
        _documented(main_ppo, "python -m trackway.main_ppo"),
    )


def _documented(app: typer.Typer, name: str) -> str:
    command = get_command(app)
    text = get_docs_for_click(obj=command, ctx=typer.Context(command, info_name=name), name=name)
    text = re.sub("^#", "##", text, flags=re.MULTILINE)
    text = re.sub(r"\*\*Commands\*\*:\n\n(?:\* .*\n)+\n", "", text)  # their sentences are cut; each has a heading below
    return re.sub(r"\s+Example: (.+?)(?=\n\n)", _fenced, text, flags=re.DOTALL)


def _fenced(example: re.Match[str]) -> str:
    return f"\n\n```console\n$ {' '.join(example[1].split())}\n```"
