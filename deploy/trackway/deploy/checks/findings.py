"""What stands in the way of a run, in two kinds: wrong on any machine, and missing on this one."""

from collections.abc import Sequence

from pydantic import BaseModel, Field
from rich.console import Group, RenderableType
from rich.text import Text

from trackway.system.user_error import UserError


class Findings(BaseModel):
    """Sentences of what was expected, what is there, and what to do."""

    wrong: list[str] = Field(default_factory=list)
    """On any machine: values, names, contradictions, and rows that were read."""
    missing_here: list[str] = Field(default_factory=list)
    """A model, a file, a GPU, a package, a key or a service that this machine lacks: the run cannot start here."""
    replaced_here: list[str] = Field(default_factory=list)
    """What this machine lacks and the run does without."""
    not_checked: list[str] = Field(default_factory=list)
    """What could not be looked at, and why."""

    @property
    def starts_here(self) -> bool:
        """Whether nothing that was looked at keeps the run from starting on this machine."""
        return not (self.wrong or self.missing_here)

    def refuse(self) -> None:
        """Raise UserError with everything for which the run does not start here."""
        reasons = [*self.wrong, *(f"missing here: {reason}" for reason in self.missing_here)]
        if len(reasons) == 1:
            raise UserError(reasons[0])
        if reasons:
            raise UserError("\n".join([f"{len(reasons)} things keep this run from starting", *_listed(reasons)]))

    def report(self) -> RenderableType:
        """As text for a terminal; nothing when nothing was found."""
        kinds = (
            ("wrong on any machine", self.wrong, "red"),
            ("missing here", self.missing_here, "yellow"),
            ("missing here, and done without", self.replaced_here, "yellow"),
            ("not checked", self.not_checked, "dim"),
        )
        lines: list[Text] = []
        for title, sentences, style in kinds:
            if sentences:
                lines += [Text(f"\n{title}", style="bold"), *(Text(line, style=style) for line in _listed(sentences))]
        return Group(*lines)


def _listed(sentences: Sequence[str]) -> list[str]:
    return [f"  - {sentence}" for sentence in sentences]
