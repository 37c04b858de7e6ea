"""Train tool-using agents with five microservices, and trace every trajectory."""

import typer

from trackway.deploy.commands import config, data, demo, services, tools, traces, training
from trackway.deploy.terminal.entry import enter

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)
app.add_typer(services.app)
app.add_typer(training.app)
app.add_typer(demo.app)
app.add_typer(config.app, name="config")
app.add_typer(data.app, name="data")
app.add_typer(tools.app, name="tools")
app.add_typer(traces.app, name="traces")


def main() -> None:
    """Entry point."""
    enter(app)


if __name__ == "__main__":
    main()
