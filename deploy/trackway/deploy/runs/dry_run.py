"""What `--dry-run` and `--preflight` print: a run's plan, and what stands in its way."""

from dataclasses import asdict

from rich.console import Group, RenderableType

from trackway.deploy.checks.run import Checked, Subject
from trackway.deploy.runs.report import plan_report


def plan_of(subject: Subject, checked: Checked) -> RenderableType:
    """For a terminal."""
    plan = plan_report(checked.plan, checked.rows, subject.config, subject.services)
    return Group(plan, checked.findings.report())


def plan_as_json(checked: Checked) -> dict[str, object]:
    """For a program."""
    found = checked.findings
    return {"starts_here": found.starts_here, **found.model_dump(), "rows": checked.rows, "plan": asdict(checked.plan)}
