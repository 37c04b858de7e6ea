"""docs/start/examples.md: every example with the first line of its own, in groups with their guide and a picture."""

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from generators.markdown import code, page

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "start" / "examples.md"


class Group(NamedTuple):
    """Examples about one subject."""

    title: str
    guide: str
    """Link to the page about it, from `docs/start/`."""
    patterns: tuple[str, ...]
    """Files below `examples/`. A README stands for its folder."""
    picture: str = ""
    """A file of `docs/pictures/`, and what it shows."""
    alt: str = ""


GROUPS = (
    Group(
        "From Python",
        "[Python and notebooks](../guides/python.md)",
        ("first_run.ipynb",),
        "notebook.png",
        "The reward of each step",
    ),
    Group("Training loops of your own", "[Tinker's API](../guides/tinker.md)", ("tinker/*.py",)),
    Group("Agents that exist already", "[Bring your agent](../guides/sessions.md)", ("agents/*.py",)),
    Group("Environments of other projects", "[Environments](../guides/environments.md)", ("environments/*.py",)),
    Group("Tools", "[Own tools](../guides/own-tools.md)", ("tools/*.py", "tools/*.yaml")),
    Group(
        "Models",
        "[Engines](../guides/engines.md)",
        ("tiny/README.md", "smollm2/README.md"),
        "reward.png",
        "Reward per step and held-out accuracy of the tiny model",
    ),
    Group("verl's recipes", "[Coming from verl](../coming-from/verl.md)", ("sglang_multiturn/**/*.yaml",)),
    Group(
        "Traces", "[Tracing](../guides/tracing.md)", ("tracing/README.md",), "phoenix.png", "A trajectory in Phoenix"
    ),
)


def gallery() -> str:
    """The page."""
    text = "Copy one from `examples/` and change it. Each file says in its first lines how it is run."
    return page("Examples", text, *(part for group in GROUPS for part in _parts(group)))


def files(group: Group) -> list[Path]:
    """The group's examples."""
    return sorted(path for pattern in group.patterns for path in (ROOT / "examples").glob(pattern))


def first_line(path: Path) -> str:
    """The first line of the example's own text: of its docstring, its comment, its first cell, or its title."""
    text = path.read_text()
    if path.suffix == ".py":
        text = ast.get_docstring(ast.parse(text)) or ""
    elif path.suffix == ".ipynb":
        text = "".join(json.loads(text)["cells"][0]["source"])
    return re.sub(r"^#+ ", "", text.partition("\n")[0])


def _parts(group: Group) -> Iterator[str]:
    yield f"## {group.title}"
    yield f"Guide: {group.guide}."
    if group.picture:
        yield f"![{group.alt}](../pictures/{group.picture})"
    yield "\n".join(f"- {code(_name(path))}: {first_line(path)}" for path in files(group))


def _name(path: Path) -> str:
    named = path.parent if path.name == "README.md" else path
    return str(named.relative_to(ROOT / "examples"))


if __name__ == "__main__":
    PAGE.write_text(gallery())
