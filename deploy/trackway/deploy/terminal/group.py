"""A group of commands whose module is imported when one of them is used, so that `trackway --help` stays fast."""

from functools import cache
from importlib import import_module

import typer
from typer.core import TyperGroup
from typer.main import get_group

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
