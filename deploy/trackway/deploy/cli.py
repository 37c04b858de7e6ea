"""Train tool-using agents with five microservices, and trace every trajectory."""

from functools import cache
from importlib import import_module
from importlib.metadata import version
from typing import Annotated

import typer
from typer.core import TyperGroup
from typer.main import get_group

from trackway.deploy.commands import console, demo, evaluate, export, new_project, services, training, why
from trackway.deploy.terminal.entry import enter
from trackway.system import refuse_inspection

_MODULES = "trackway.deploy.commands"


class _LateGroup(TyperGroup):
    """The commands of `trackway.deploy.commands.<name>.app`."""

    def list_commands(self, ctx: typer.Context) -> list[str]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._group().list_commands(ctx)

    def get_command(self, ctx: typer.Context, cmd_name: str):  # pyright: ignore
        return self._group().get_command(ctx, cmd_name)

    def _group(self) -> TyperGroup:
        return _loaded(str(self.name))


@cache
def _loaded(name: str) -> TyperGroup:
    return get_group(import_module(f"{_MODULES}.{name}").app)


def group(name: str, help: str) -> typer.Typer:
    """The group `trackway NAME`, with the commands of the Typer `app` in `trackway.deploy.commands.NAME`."""
    return typer.Typer(name=name, cls=_LateGroup, help=help, no_args_is_help=True, callback=_nothing)


def _nothing() -> None:
    """A callback makes Typer keep a group that has no command yet."""


app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)
app.add_typer(new_project.app)
app.add_typer(services.app)
app.add_typer(training.app)
app.add_typer(evaluate.app)
app.add_typer(evaluate.app)
app.add_typer(demo.app)
app.add_typer(export.app)
app.add_typer(console.app)
app.add_typer(why.app)
app.add_typer(why.app)
app.add_typer(group("config", "Look up the keys of a run's configuration."))
app.add_typer(group("data", "Write datasets in verl's row schema."))
app.add_typer(group("policies", "List, load and drop the policies of running services."))
app.add_typer(group("runs", "List runs, and show their metrics and logs."))
app.add_typer(group("traces", "Find, draw, compare and check trajectory traces."))


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"trackway {version('trackway')}")
        raise typer.Exit


@app.callback()
def _trackway(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """The options before a command."""


def main() -> None:
    """Entry point."""
    refuse_inspection()
    enter(app)


if __name__ == "__main__":
    main()
