"""Check and train a run with its own services, which are stopped afterwards."""

from typing import TYPE_CHECKING

from trackway.deploy.commands.run_output import print_end, print_plan, report_interrupted, wait_for_delivery
from trackway.deploy.terminal.console import board, run_bar, stderr

if TYPE_CHECKING:
    from trackway.deploy.runs.standalone import StandaloneRun


def train_standalone(
    run: "StandaloneRun", *, dry_run: bool, preflight: bool, keep: bool, as_json: bool, skip_damaged: bool = False
) -> None:
    """Check the run, and train it unless `dry_run` or `preflight`; then only its plan is printed.

    keep: leave the services running afterwards. Raises UserError when the run cannot start or fails.
    """
    from trackway.deploy.runs import standalone
    from trackway.deploy.runs.report import settings_report
    from trackway.deploy.terminal.tables import wide

    wide(stderr).print(settings_report(run.config, run.decisions))
    with board(as_json) as shown:
        checked = run.check(load=not dry_run or preflight, report=shown.report)
    if dry_run or preflight:
        print_plan(run.subject, checked, preflight, as_json)
        return
    checked.findings.refuse()
    folder = run.left_off()
    if folder is not None:
        stderr.print(f"resuming run {folder.name}{standalone.resumes_with(folder, run.config)}", soft_wrap=True)
    _train(run, keep, skip_damaged, as_json)


def _train(run: "StandaloneRun", keep: bool, skip_damaged: bool, as_json: bool) -> None:
    with board(as_json) as shown:
        deployment = run.bring_up(shown.report)
    stopping = not keep and run.running is None
    stderr.print(f"services  {deployment.address}   MLflow  {deployment.mlflow_uri}", soft_wrap=True)
    try:
        with run_bar(as_json) as bar:
            info = run.train(deployment, bar.show, skip_damaged)
        info = wait_for_delivery(info, deployment, as_json, stopping)
    except KeyboardInterrupt:
        name = run.config.trainer.experiment_name
        report_interrupted(name, deployment, "repeat this command to resume", stopping)
        raise
    finally:
        if not keep:
            with board(as_json) as shown:
                run.take_down(deployment, shown.report)
    print_end(info, deployment, as_json)
