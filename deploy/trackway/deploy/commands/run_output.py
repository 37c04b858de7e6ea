"""Parts of all commands that train: a plan with its problems, services, a run's progress, its end and its losses."""

from typing import TYPE_CHECKING

import typer
from rich.markup import escape

from trackway.deploy.commands.options import OUTPUTS
from trackway.deploy.terminal.progress import print_json, stderr, stdout

if TYPE_CHECKING:
    from trackway.deploy.checks.run import Checked, Subject
    from trackway.deploy.deployment.record import Deployment
    from trackway.deploy.runs.session import RunSession
    from trackway.deploy.runs.shown import Begin
    from trackway.wire.trainer import RunInfo


def print_plan(subject: "Subject", checked: "Checked", preflight: bool, as_json: bool) -> None:
    """Print the plan and its problems. Exits with status 2 if a problem prevents the run from starting.

    Without `preflight`, only problems on any machine and paths that lead nowhere count.
    """
    from trackway.deploy.runs.report import plan_as_json, plan_report
    from trackway.deploy.terminal.tables import wide

    if as_json:
        print_json(plan_as_json(checked))
    else:
        wide(stdout).print(plan_report(checked, subject.config, subject.services), checked.findings.report())
    if checked.findings.is_wrong or (preflight and not checked.findings.starts_here):
        raise typer.Exit(2)


def run_to_end(session: "RunSession", name: str, begin: "Begin", as_json: bool) -> "RunInfo":
    """Begin a run and show its progress until it has ended.

    After Ctrl-C, which is raised again, print whether the run has stopped, how to resume it, and what backends lack.
    """
    from trackway.deploy.runs import shown

    try:
        return shown.followed(session, name, as_json, begin)
    except KeyboardInterrupt:
        report_interrupted(session, name)
        raise


def report_interrupted(session: "RunSession", name: str) -> None:
    """Print whether a run has stopped after Ctrl-C, how to resume it, and what backends lack and how to send it.

    A second Ctrl-C does not wait for the checkpoint.
    """
    from trackway.deploy.runs.losses import Unsent
    from trackway.deploy.runs.shown import report_unsent
    from trackway.wire.errors import TrackwayError
    from trackway.wire.trainer import RunState

    outputs = session.deployment.outputs
    elsewhere = "" if outputs == OUTPUTS.resolve() else f" --outputs {outputs}"
    to_resume = f"to resume: trackway train --resume {name}{elsewhere}"
    try:
        info = session.info(name)
    except TrackwayError as error:
        stderr.print(escape(f"the state of run {name} is unknown: {error.message}; {to_resume}"), soft_wrap=True)
        return
    state = "checkpoint saved" if info.state is RunState.STOPPED else f"run {name} is {info.state}"
    stderr.print(escape(f"{state}; {to_resume}"), soft_wrap=True)
    report_unsent(Unsent.of(info), session)


def report_losses(info: "RunInfo", deployment: "Deployment") -> None:
    """Print how many rollouts failed, and which spans, metrics and feedback were lost or are still waiting."""
    from trackway.deploy.runs.losses import rollout_losses, trace_losses, tracking_losses

    outputs = None if deployment.attached else deployment.outputs
    for sentence in rollout_losses(info, outputs):
        stderr.print(f"[yellow]rollouts:[/] {escape(sentence)}", soft_wrap=True)
    for sentence in trace_losses(info, outputs):
        stderr.print(f"[yellow]traces:[/] {escape(sentence)}", soft_wrap=True)
    for sentence in tracking_losses(info):
        stderr.print(f"[yellow]tracking:[/] {escape(sentence)}", soft_wrap=True)


def print_end(info: "RunInfo", deployment: "Deployment", as_json: bool) -> None:
    """Print how the run ended, and what was lost of it."""
    if as_json:
        print_json(info)
        return
    stdout.print(f"run {info.run} {info.state.value} at step {info.step}; folder {info.folder}", soft_wrap=True)
    report_losses(info, deployment)
