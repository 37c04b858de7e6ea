"""`python -m trackway.main_ppo`: verl's entry point on this machine. The work is in `trackway.deploy`."""

import sys

import typer

from trackway.deploy.commands.training import train
from trackway.deploy.terminal.entry import enter

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command(name="trackway.main_ppo")(train)


def main() -> None:
    """Entry point."""
    if not any(word.startswith("--resume") for word in sys.argv):  # a resumed run has its own configuration
        sys.argv.insert(1, "--config-name=ppo_trainer")  # the last one given counts
    enter(app)


if __name__ == "__main__":
    main()
