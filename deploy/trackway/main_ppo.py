"""`python -m trackway.main_ppo`: verl's entry point on this machine. The work is in `trackway.deploy`."""

import sys

import typer

from trackway.deploy.commands.training import train
from trackway.deploy.terminal.entry import enter

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command(name="trackway.main_ppo")(train)


def enter_with(app: typer.Typer, preset: str) -> None:
    """Run the command line with this preset, unless it names another one."""
    if not any(word.startswith("--resume") for word in sys.argv):  # a resumed run has its own configuration
        sys.argv.insert(1, f"--config-name={preset}")  # the last one given counts
    enter(app)


def main() -> None:
    """Entry point."""
    enter_with(app, "ppo_trainer")


if __name__ == "__main__":
    main()
