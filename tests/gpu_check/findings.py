"""What the checks found, and the page that says it."""

import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version

import torch


@dataclass(frozen=True)
class Finding:
    """A property that was checked."""

    what: str
    expected: str
    got: str
    holds: bool

    @classmethod
    def below(cls, what: str, value: float, limit: float) -> "Finding":
        """A value that has to be at most `limit`; NaN is not."""
        return cls(what, f"<= {limit:g}", f"{value:.3g}", value <= limit)

    @classmethod
    def equal(cls, what: str, expected: object, got: object) -> "Finding":
        """A value that has to be this one."""
        return cls(what, str(expected), str(got), got == expected)


@dataclass
class Report:
    """Findings by check, and figures."""

    device: torch.device
    findings: dict[str, Sequence[Finding]] = field(default_factory=dict)
    figures: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    """By check."""

    @property
    def holds(self) -> bool:
        """Whether every finding holds."""
        return all(finding.holds for findings in self.findings.values() for finding in findings)

    def page(self) -> str:
        """The report as Markdown."""
        lines = ["# GPU check", "", f"{_device_name(self.device)}; {_versions()}", "", "| check | expected | got | |"]
        lines.append("|---|---|---|---|")
        for check, findings in self.findings.items():
            for finding in findings:
                mark = "ok" if finding.holds else "**FAILED**"
                lines.append(f"| {check}: {finding.what} | {finding.expected} | {finding.got} | {mark} |")
        if self.figures:
            lines += ["", "| figure | |", "|---|---|"]
            lines += [f"| {name} | {value} |" for name, value in self.figures.items()]
        took = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in self.seconds.items())
        return "\n".join([*lines, "", f"Took {sum(self.seconds.values()):.0f} s: {took}.", ""])


def _device_name(device: torch.device) -> str:
    if device.type != "cuda":
        return f"CPU, {torch.get_num_threads()} threads"
    memory = torch.cuda.get_device_properties(device).total_memory / 2**30
    return f"{torch.cuda.get_device_name(device)}, {memory:.0f} GiB"


def _versions() -> str:
    def of(name: str) -> str:
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:
            return f"{name} ?"

    return ", ".join([f"Python {platform.python_version()}", of("torch"), of("transformers")])
