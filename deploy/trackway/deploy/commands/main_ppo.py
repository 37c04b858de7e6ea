"""`python -m trackway.main_ppo`: start the services, train, and stop the services."""

from pathlib import Path
from typing import Annotated

import typer

from trackway.deploy.commands.options import OUTPUTS, DryRun, Outputs, Preflight, json_of
from trackway.deploy.commands.standalone_run import train_standalone
from trackway.deploy.terminal.console import print_json
from trackway.deploy.terminal.entry import enter

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

ConfigPath = Annotated[
    Path | None,
    typer.Option(
        "--config-path", "-cp", help="Folder of configurations, or a YAML file; default the built-in presets."
    ),
]
ConfigName = Annotated[
    str,
    typer.Option("--config-name", "-cn", help="A preset, such as ppo_trainer or fully_async_ppo_trainer, or a file."),
]


@app.command(name="trackway.main_ppo")
def main_ppo(
    overrides: Annotated[list[str] | None, typer.Argument(help="verl's keys in Hydra's grammar: key=value.")] = None,
    config_path: ConfigPath = None,
    config_name: ConfigName = "ppo_trainer",
    outputs: Outputs = OUTPUTS,
    dry_run: DryRun = False,
    preflight: Preflight = False,
    keep: Annotated[bool, typer.Option("--keep", help="Keep services and MLflow running afterwards.")] = False,
    cfg: Annotated[str | None, typer.Option("--cfg", help="`job`: print the resolved configuration and exit.")] = None,
    as_json: Annotated[bool, json_of("the run at its end, or the plan and its problems")] = False,
) -> None:
    """Train with verl's command line. Uses the services of the outputs folder, or starts services for this run.

    Example: python -m trackway.main_ppo --config-path=examples/sglang_multiturn/config
    --config-name=gsm8k_multiturn_grpo actor_rollout_ref.model.path=Qwen/Qwen2.5-3B-Instruct data.train_files=...
    Check it first with --dry-run (errors in the configuration) or --preflight (also what this machine lacks).
    """
    from trackway.deploy.runs import standalone
    from trackway.deploy.runs.report import as_yaml

    if cfg is not None:
        if cfg != "job":
            raise typer.BadParameter(f"expected job, got {cfg}", param_hint="--cfg")
        resolved = standalone.configured(overrides or [], config_path, config_name)
        print_json(resolved) if as_json else typer.echo(as_yaml(resolved), nl=False)
        return
    run = standalone.prepare(overrides or [], config_path, config_name, outputs, plan_only=dry_run or preflight)
    train_standalone(run, dry_run=dry_run, preflight=preflight, keep=keep, as_json=as_json)


def main() -> None:
    """Entry point."""
    enter(app)
