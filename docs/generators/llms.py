"""llms.txt: every page of the documentation with its first sentence, for programs that read it (llmstxt.org)."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

DOCS = Path(__file__).parents[1]
_HEAD = """# Trackway

> Agentic RL post-training as five Ray Serve microservices, where one trajectory is one OpenTelemetry trace: rollout,
> tools, reward, agent and trainer over plain HTTP, traced to MLflow, W&B Weave or any OTLP backend.
"""


def llms() -> str:
    """The pages in the order of the navigation, without those that are made from the code."""
    config = yaml.safe_load(re.sub(r"!!python/\S+", "", (DOCS.parent / "mkdocs.yml").read_text()))
    sections = [(title, pages) for part in config["nav"] for title, pages in part.items() if title != "Reference"]
    blocks = [f"## {title}\n\n" + "".join(_line(DOCS / page) for page in _pages(pages)) for title, pages in sections]
    return "\n".join([_HEAD, *blocks])


def _pages(node: Any) -> Iterator[str]:
    if isinstance(node, str):
        yield node
    else:
        for child in node.values() if isinstance(node, dict) else node:
            yield from _pages(child)


def _line(page: Path) -> str:
    """A link with the page's title and the first sentence of its text."""
    blocks = re.sub(r"^```.*?^```\n", "", page.read_text(), flags=re.MULTILINE | re.DOTALL).split("\n\n")
    text = next((block for block in map(str.strip, blocks) if block[:1].isalpha() or block[:1] in "*`["), "")
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(text.split()))
    sentence = re.split(r"(?<=[.])\s", plain)[0].rstrip(":")
    return f"- [{blocks[0].lstrip('# ')}]({page.relative_to(DOCS)}): {sentence}\n"


if __name__ == "__main__":
    (DOCS / "llms.txt").write_text(llms())
