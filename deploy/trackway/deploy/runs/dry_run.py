"""Output of `--dry-run` and `--preflight`: the plan of a run and its problems."""

from dataclasses import asdict

from rich.console import Group, RenderableType

from trackway.deploy.checks.run import Checked, Subject
from trackway.deploy.runs.report import plan_report


def plan_of(subject: Subject, checked: Checked) -> RenderableType:
    """The plan and the findings for a terminal."""
    plan = plan_report(checked, subject.config, subject.services)
    return Group(plan, checked.findings.report())


def plan_as_json(checked: Checked) -> dict[str, object]:
    """The plan and the findings as JSON."""
    findings = checked.findings
    return {
        "starts_here": findings.starts_here,
        **findings.model_dump(),
        "rows": checked.rows,
        "plan": asdict(checked.plan),
        "gpu_memory": None if checked.memory is None else asdict(checked.memory),
    }
