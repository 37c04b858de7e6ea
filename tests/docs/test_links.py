"""Links between pages, and every mention of a page in code, messages and manifests."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ["benchmarks", "clients", "deploy", "docs", "examples", "k8s", "services", "tests"]
SUFFIXES = {".md", ".py", ".yaml", ".yml", ".env", ".sh", ".json", ".toml"}
GENERATED = "docs/reference/"
"""`make docs` makes these pages from the code, and checks the links to them."""

LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)")
MENTION = re.compile(r"(?<![\w/.-])docs/[\w/.-]+\.(?:md|png|svg|py)\b")


def files() -> Iterator[Path]:
    yield from (path for path in ROOT.iterdir() if path.suffix in SUFFIXES or path.name == "Makefile")
    for folder in FOLDERS:
        yield from (path for path in sorted((ROOT / folder).rglob("*")) if path.is_file() and path.suffix in SUFFIXES)


def prose(page: Path) -> str:
    """The page without its code."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """GitHub's and Python-Markdown's name for each heading of a page."""
    headings = re.findall(r"^#+ (.+)$", prose(page), flags=re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip()) for heading in headings}


PAGES = [path for path in files() if path.suffix == ".md" and not path.is_relative_to(ROOT / GENERATED)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_relative_link_leads_to_a_file_and_a_heading_of_it(page: Path) -> None:
    broken: list[str] = []
    for target, anchor in LINK.findall(prose(page)):
        path = (page.parent / target).resolve() if target else page
        if ":" in target or path.is_relative_to(ROOT / GENERATED):
            continue
        if not path.exists() or (anchor and anchor not in anchors(path)):
            broken.append(f"{target}#{anchor}")
    assert broken == []


@pytest.mark.parametrize("page", [page for page in PAGES if page.is_relative_to(ROOT / "docs")], ids=lambda p: p.name)
def test_a_page_of_the_site_links_only_to_pages_of_the_site(page: Path) -> None:
    targets = [target for target, _ in LINK.findall(prose(page)) if target and ":" not in target]
    assert [target for target in targets if not (page.parent / target).resolve().is_relative_to(ROOT / "docs")] == []


def test_a_page_that_code_a_message_or_a_manifest_names_exists() -> None:
    missing = {
        f"{path.relative_to(ROOT)}: {mention}"
        for path in files()
        for mention in MENTION.findall(path.read_text(errors="replace"))
        if not (ROOT / mention).exists() and not mention.startswith(GENERATED)
    }
    assert missing == set()
