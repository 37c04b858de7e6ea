"""Output of commands about a run: its plan with all problems, its end, and its losses."""

from contextlib import suppress
from typing import TYPE_CHECKING

import typer
from rich.markup import escape

from trackway.deploy.terminal.console import DeliveryBar, delivery_bar, print_json, stderr, stdout

if TYPE_CHECKING:
    from trackway.deploy.checks.run import Checked, Subject
    from trackway.deploy.deployment.record import Deployment
    from trackway.deploy.runs.delivery import Unsent
    from trackway.wire.trainer import RunInfo


def print_plan(subject: "Subject", checked: "Checked", preflight: bool, as_json: bool) -> None:
    """Print the plan and its problems. Exits with status 2 if a problem prevents the run from starting.

    Without `preflight`, only problems on any machine count.
    """
    from trackway.deploy.runs.dry_run import plan_as_json, plan_of
    from trackway.deploy.terminal.tables import wide

    if as_json:
        print_json(plan_as_json(checked))
    else:
        wide(stdout).print(plan_of(subject, checked))
    if checked.findings.wrong or (preflight and not checked.findings.starts_here):
        raise typer.Exit(2)


def wait_for_delivery(info: "RunInfo", deployment: "Deployment", quiet: bool, stopping: bool) -> "RunInfo":
    """Wait with a progress bar until backends have what the run recorded; returns the run with its counts of then.

    Ctrl-C ends the wait, and says what is left and how to send it. `stopping`: the services stop after this command.
    """
    from trackway.deploy.runs.delivery import unsent_of
    from trackway.deploy.runs.delivery import wait_for_delivery as wait

    left = unsent_of(info)

    def show(unsent: "Unsent", bar: DeliveryBar) -> None:
        nonlocal left
        left = unsent
        bar.show(unsent.total, str(unsent))

    with suppress(KeyboardInterrupt), delivery_bar(quiet) as bar:
        info = wait(deployment, info, lambda unsent: show(unsent, bar))
    _report_unsent(left, deployment, stopping)
    return info


def report_interrupted(run: str, deployment: "Deployment", to_resume: str, stopping: bool) -> None:
    """Print whether a run has stopped after Ctrl-C, how to resume it, and what backends lack and how to send it.

    A second Ctrl-C does not wait for the checkpoint.
    """
    from trackway.deploy.runs.delivery import unsent_of
    from trackway.deploy.runs.launch import info_of
    from trackway.wire.errors import TrackwayError
    from trackway.wire.trainer import RunState

    try:
        info = info_of(deployment, run)
    except TrackwayError as error:
        stderr.print(escape(f"the state of run {run} is unknown: {error.message}; {to_resume}"), soft_wrap=True)
        return
    state = "checkpoint saved" if info.state is RunState.STOPPED else f"run {run} is {info.state}"
    stderr.print(escape(f"{state}; {to_resume}"), soft_wrap=True)
    _report_unsent(unsent_of(info), deployment, stopping)


def _report_unsent(left: "Unsent", deployment: "Deployment", stopping: bool) -> None:
    if left.total:
        stderr.print(f"[yellow]not sent:[/] {left}; {_how_to_send(deployment, stopping)}", soft_wrap=True)


def _how_to_send(deployment: "Deployment", stopping: bool) -> str:
    """How what is left of a run gets to its backends, in words."""
    if stopping:
        return f"kept on disk; to send it: trackway up --outputs {escape(str(deployment.outputs))}"
    return "kept on disk; the running services send it once the backends accept it (trackway status)"


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
