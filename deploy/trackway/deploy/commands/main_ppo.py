"""`python -m trackway.main_ppo`: start the services, train, and stop the services."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trackway.deploy.commands.options import OUTPUTS, DryRun, Json, Outputs, Preflight
from trackway.deploy.commands.training import print_plan, report_losses
from trackway.deploy.terminal.console import board, print_json, run_bar, stderr, stdout
from trackway.deploy.terminal.entry import enter

if TYPE_CHECKING:
    from trackway.deploy.runs.standalone import StandaloneRun

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

ConfigPath = Annotated[
    Path | None,
    typer.Option(
        "--config-path", "-cp", help="Folder of configurations, or a YAML file; default the built-in presets."
    ),
]
ConfigName = Annotated[
    str,
    typer.Option("--config-name", "-cn", help="Name of the configuration: default, ppo_trainer, tiny_demo, or a file."),
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
    as_json: Json = False,
) -> None:
    """Train with verl's command line. Uses the services of the outputs folder, or starts services for this run.

    Example: python -m trackway.main_ppo --config-path=examples/sglang_multiturn/config
    --config-name=gsm8k_multiturn_grpo actor_rollout_ref.model.path=Qwen/Qwen2.5-3B-Instruct data.train_files=...
    Check it first with --dry-run (errors in the configuration) or --preflight (also what this machine lacks).
    """
    from trackway.deploy.runs import standalone
    from trackway.deploy.runs.report import as_yaml, settings_report, wide

    if cfg is not None:
        if cfg != "job":
            raise typer.BadParameter(f"expected job, got {cfg}", param_hint="--cfg")
        typer.echo(as_yaml(standalone.configured(overrides or [], config_path, config_name)), nl=False)
        return
    run = standalone.prepare(overrides or [], config_path, config_name, outputs)
    wide(stderr).print(settings_report(run.config, run.decisions))
    with board(as_json) as shown:
        checked = run.check(load=not dry_run or preflight, report=shown.report)
    if dry_run or preflight:
        print_plan(run.subject, checked, preflight, as_json)
        return
    checked.findings.refuse()
    folder = run.left_off()
    if folder is not None:
        kept = ", ".join(standalone.changed_since(folder, run.config))
        stderr.print(f"resuming run {folder.name}{f' with its original {kept}' if kept else ''}", soft_wrap=True)
    _train(run, keep, as_json)


def _train(run: "StandaloneRun", keep: bool, as_json: bool) -> None:
    with board(as_json) as shown:
        deployment = run.bring_up(shown.report)
    stderr.print(f"services  {deployment.base_url}   MLflow  {deployment.mlflow_uri}", soft_wrap=True)
    try:
        with run_bar(as_json) as bar:
            info = run.train(deployment, bar.show)
    except KeyboardInterrupt:
        stderr.print("checkpoint saved; repeat this command to resume")
        raise
    finally:
        if not keep:
            with board(as_json) as shown:
                run.take_down(deployment, shown.report)
    if as_json:
        print_json(info)
        return
    stdout.print(f"run {info.run} {info.state.value} at step {info.step}; folder {info.folder}", soft_wrap=True)
    report_losses(info, deployment)


def main() -> None:
    """Entry point."""
    enter(app)
