"""Problems that prevent a run: invalid on any machine, or missing on this one."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from pydantic import BaseModel, Field
from rich.console import Group, RenderableType
from rich.text import Text

from trackway.deploy.deployment.processes import Report
from trackway.run_config import UnsupportedKey
from trackway.system.process import UserError


class Findings(BaseModel):
    """Problems as sentences, each with the expected value, the actual one, and the remedy."""

    wrong: list[str] = Field(default_factory=list)
    """Problems on any machine: invalid values, unknown names, contradictions, invalid rows."""
    unsupported: list[UnsupportedKey] = Field(default_factory=list)
    """Keys of verl that ask for what Trackway does not have. The plan leaves them out, and the run cannot start."""
    not_found: list[str] = Field(default_factory=list)
    """Paths of rows, the model and own code that do not exist on this machine. The run cannot start here."""
    missing_here: list[str] = Field(default_factory=list)
    """A GPU, package, API key, service or checkpoint that this machine lacks. The run cannot start here."""
    replaced_here: list[str] = Field(default_factory=list)
    """Requests that this machine cannot meet and that the run can do without."""
    not_checked: list[str] = Field(default_factory=list)
    """Checks that could not be made, with the reason."""

    @property
    def starts_here(self) -> bool:
        """Return whether no check found a problem that prevents the run from starting on this machine."""
        return not (self.is_wrong or self.unsupported or self.missing_here)

    @property
    def is_wrong(self) -> bool:
        """Return whether a plan ends with an error: a value is wrong on any machine, or a path leads nowhere."""
        return bool(self.wrong or self.not_found)

    @property
    def _problems(self) -> int:
        return len(self.wrong) + len(self.not_found) + len(self.missing_here)

    @contextmanager
    def part(self, report: Report, name: str, doing: str) -> Iterator[None]:
        """Report a part as `doing`, and at the end as `ready`, `with problems` or `not checked`, as the block added."""
        problems, unchecked = self._problems, len(self.not_checked)
        report(name, doing)
        try:
            yield
        finally:
            added = self._problems > problems
            skipped = len(self.not_checked) > unchecked
            report(name, "with problems" if added else "not checked" if skipped else "ready")

    def refuse(self) -> None:
        """Raise UserError with every problem that prevents the run from starting here."""
        reasons = [*self.wrong, *(f"missing here: {reason}" for reason in self._missing)]
        if len(reasons) == 1:
            raise UserError(reasons[0])
        if reasons:
            raise UserError("\n".join([f"{len(reasons)} problems prevent this run from starting", *_listed(reasons)]))

    def report(self) -> RenderableType:
        """The problems as text for a terminal. Empty without problems."""
        kinds = (
            ("wrong on any machine", self.wrong, "red"),
            ("missing here", self._missing, "yellow"),
            ("missing here, not required", self.replaced_here, "yellow"),
            ("not checked", self.not_checked, "dim"),
        )
        lines: list[Text] = []
        for title, sentences, style in kinds:
            if sentences:
                lines += [Text(f"\n{title}", style="bold"), *(Text(line, style=style) for line in _listed(sentences))]
        if self.unsupported:
            lines.append(Text(f"\n{self._refusal}", style="bold"))
        return Group(*lines)

    @property
    def _missing(self) -> list[str]:
        return [*(key.sentence for key in self.unsupported), *self.not_found, *self.missing_here]

    @property
    def _refusal(self) -> str:
        keys = ", ".join(key.key for key in self.unsupported)
        return f"without --dry-run this command refuses to start, because Trackway lacks what these ask for: {keys}"


def _listed(sentences: Sequence[str]) -> list[str]:
    return [f"  - {sentence}" for sentence in sentences]
