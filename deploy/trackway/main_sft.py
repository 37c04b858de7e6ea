"""`python -m trackway.main_sft`: verl's supervised training on this machine. The work is in `trackway.deploy`."""

import typer

from trackway.deploy.commands.training import train
from trackway.main_ppo import enter_with

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command(name="trackway.main_sft")(train)


def main() -> None:
    """Entry point."""
    enter_with(app, "sft")


if __name__ == "__main__":
    main()
