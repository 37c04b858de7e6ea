"""`python -m trackway.main_ppo`: one command that brings the services up, trains, and takes them down again."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trackway.deploy.commands.options import OUTPUTS, DryRun, Json, Outputs, Preflight
from trackway.deploy.commands.training import tell_losses, tell_plan
from trackway.deploy.terminal.console import board, print_json, run_bar, stderr, stdout
from trackway.deploy.terminal.entry import enter

if TYPE_CHECKING:
    from trackway.deploy.runs.standalone import StandaloneRun

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

ConfigPath = Annotated[
    Path | None, typer.Option("--config-path", "-cp", help="Folder of configurations, or a YAML file; default ours.")
]
ConfigName = Annotated[str, typer.Option("--config-name", "-cn", help="Which one: default, ppo_trainer, tiny_demo.")]


@app.command(name="trackway.main_ppo")
def main_ppo(
    overrides: Annotated[list[str] | None, typer.Argument(help="verl's keys in Hydra's grammar: key=value.")] = None,
    config_path: ConfigPath = None,
    config_name: ConfigName = "ppo_trainer",
    outputs: Outputs = OUTPUTS,
    dry_run: DryRun = False,
    preflight: Preflight = False,
    keep: Annotated[bool, typer.Option("--keep", help="Leave services and MLflow running at the end.")] = False,
    cfg: Annotated[str | None, typer.Option("--cfg", help="`job` prints the whole configuration and ends.")] = None,
    as_json: Json = False,
) -> None:
    """Train with verl's command line, on services that run for the outputs folder or are brought up for this run.

    Example: python -m trackway.main_ppo --config-path=examples/sglang_multiturn/config
    --config-name=gsm8k_multiturn_grpo actor_rollout_ref.model.path=Qwen/Qwen2.5-3B-Instruct data.train_files=...
    Before it, the same with --dry-run (what is wrong anywhere) or --preflight (what is missing here as well).
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
        tell_plan(run.subject, checked, preflight, as_json)
        return
    checked.findings.refuse()
    folder = run.left_off()
    if folder is not None:
        kept = ", ".join(standalone.changed_since(folder, run.config))
        stderr.print(f"goes on with run {folder.name}{f' and its own {kept}' if kept else ''}", soft_wrap=True)
    _train(run, keep, as_json)


def _train(run: "StandaloneRun", keep: bool, as_json: bool) -> None:
    with board(as_json) as shown:
        deployment = run.bring_up(shown.report)
    stderr.print(f"services  {deployment.base_url}   MLflow  {deployment.mlflow_uri}", soft_wrap=True)
    try:
        with run_bar(as_json) as bar:
            info = run.train(deployment, bar.show)
    except KeyboardInterrupt:
        stderr.print("saved; the same command goes on with it")
        raise
    finally:
        if not keep:
            with board(as_json) as shown:
                run.take_down(deployment, shown.report)
    if as_json:
        print_json(info)
        return
    stdout.print(f"run {info.run} {info.state.value} at step {info.step}; folder {info.folder}", soft_wrap=True)
    tell_losses(info, deployment)


def main() -> None:
    """Entry point."""
    enter(app)
