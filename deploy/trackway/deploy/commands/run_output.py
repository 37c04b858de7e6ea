"""Parts of all commands that train: a plan with its problems, services, a run's progress, its end and its losses."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import typer
from rich.markup import escape

from trackway.deploy.commands.options import OUTPUTS
from trackway.deploy.terminal.progress import board, delivery_bar, print_json, run_bar, stderr, stdout

if TYPE_CHECKING:
    from trackway.deploy.checks.run import Checked, Subject
    from trackway.deploy.deployment.record import Deployment
    from trackway.deploy.runs.losses import Unsent
    from trackway.deploy.runs.session import RunSession, Show
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


@contextmanager
def session_of(subject: "Subject", keep: bool, as_json: bool) -> "Iterator[RunSession]":
    """A session on the subject's services. Those that it starts are stopped after the block, unless `keep`."""
    from trackway.deploy.runs.session import RunSession

    with board(as_json) as shown:
        session = RunSession.open(subject, shown.report)
    session.own = session.own and not keep
    if subject.deployment is None:
        services = session.deployment
        stderr.print(f"services  {services.address}   MLflow  {services.mlflow_uri}", soft_wrap=True)
    try:
        yield session
    finally:
        with board(as_json or not session.own) as shown:
            session.close(shown.report)


def run_to_end(session: "RunSession", name: str, begin: "Callable[[Show], RunInfo]", as_json: bool) -> "RunInfo":
    """Begin a run and show its progress until it has ended.

    After Ctrl-C, which is raised again, print whether the run has stopped, how to resume it, and what backends lack.
    """
    try:
        with run_bar(as_json) as bar:
            begin(bar.show)
            return session.follow(name, bar.show)
    except KeyboardInterrupt:
        report_interrupted(session, name)
        raise


def deliver(session: "RunSession", info: "RunInfo", quiet: bool) -> "RunInfo":
    """Wait with a progress bar until backends have what the run recorded. Returns the run with its counts of then.

    Ctrl-C ends the wait, and says what is left and how to send it.
    """
    from trackway.deploy.runs.losses import Unsent

    left = Unsent.of(info)

    def show(unsent: "Unsent") -> None:
        nonlocal left
        left = unsent
        bar.show(unsent.total, str(unsent))

    with suppress(KeyboardInterrupt), delivery_bar(quiet) as bar:
        info = session.deliver(info, show)
    _report_unsent(left, session)
    return info


def report_interrupted(session: "RunSession", name: str) -> None:
    """Print whether a run has stopped after Ctrl-C, how to resume it, and what backends lack and how to send it.

    A second Ctrl-C does not wait for the checkpoint.
    """
    from trackway.deploy.runs.losses import Unsent
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
    _report_unsent(Unsent.of(info), session)


def _report_unsent(left: "Unsent", session: "RunSession") -> None:
    if left.total:
        how = "the running services send it once the backends accept it (trackway status)"
        if session.own:
            how = f"to send it: trackway up --outputs {escape(str(session.deployment.outputs))}"
        stderr.print(f"[yellow]not sent:[/] {left}; kept on disk; {how}", soft_wrap=True)


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
