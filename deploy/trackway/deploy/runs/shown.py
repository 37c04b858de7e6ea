"""Runs and evaluations with their progress, for the command line and for Python.

Each function shows it on the terminal or in the notebook, and nothing with `quiet`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from rich.markup import escape

from trackway.deploy.checks.run import Subject
from trackway.deploy.runs.losses import Unsent
from trackway.deploy.runs.session import RunSession, Show
from trackway.deploy.terminal.progress import board, delivery_bar, row_bar, run_bar, stderr
from trackway.wire.trainer import RunInfo

if TYPE_CHECKING:
    from trackway.deploy.runs.evaluate import EvaluationRun
    from trackway.evaluation.summary import Evaluation

Begin = Callable[[Show], RunInfo]


@contextmanager
def opened(subject: Subject, quiet: bool = False, keep: bool = False) -> Iterator[RunSession]:
    """A session on the services of a checked run. Those that it starts are stopped after the block, unless `keep`."""
    if subject.resumes:
        stderr.print(f"resuming {subject.resumes}", soft_wrap=True)
    with board(quiet) as shown:
        session = RunSession.open(subject, shown.report)
    if session.own:
        services = session.deployment
        stderr.print(f"services  {services.address}   MLflow  {services.mlflow_uri}", soft_wrap=True)
        session.own = not keep
    try:
        yield session
    finally:
        if session.own:
            with board(quiet) as shown:
                session.close(shown.report)


def followed(session: RunSession, name: str, quiet: bool = False, begin: Begin | None = None) -> RunInfo:
    """Begin the run if asked to, and follow it to its end."""
    with run_bar(quiet) as bar:
        if begin is not None:
            begin(bar.show)
        return session.follow(name, bar.show)


def delivered(session: RunSession, info: RunInfo, quiet: bool = False) -> RunInfo:
    """Wait until backends have what the run recorded. Returns the run with its counts of then.

    Ctrl-C ends the wait, and says what is left and how to send it.
    """
    left = Unsent.of(info)

    def show(unsent: Unsent) -> None:
        nonlocal left
        left = unsent
        bar.show(unsent.total, str(unsent))

    with suppress(KeyboardInterrupt), delivery_bar(quiet) as bar:
        info = session.deliver(info, show)
    report_unsent(left, session)
    return info


def report_unsent(left: Unsent, session: RunSession) -> None:
    """Print what backends lack, and how to send it."""
    if left.total:
        how = "the running services send it once the backends accept it (trackway status)"
        if session.own:
            how = f"to send it: trackway up --outputs {escape(str(session.deployment.outputs))}"
        stderr.print(f"[yellow]not sent:[/] {left}; kept on disk; {how}", soft_wrap=True)


def evaluated(prepared: "EvaluationRun", quiet: bool = False) -> "Evaluation":
    """Check and run an evaluation."""
    with board(quiet) as shown:
        findings, rows = prepared.check(shown.report)
        findings.refuse()
    assert rows is not None
    if not quiet:
        for reason in (*findings.not_checked, *findings.replaced_here):
            stderr.print(f"[yellow]note:[/] {reason}", soft_wrap=True)
    with row_bar(quiet) as bar:
        return prepared.run(rows, bar.report, bar.show)
