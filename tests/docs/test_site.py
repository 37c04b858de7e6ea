"""The documentation site, built as `make docs` builds it."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from generators.__main__ import PAGES, write

ROOT = Path(__file__).parents[2]
BUILD = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
FOREIGN = re.compile(r"""<(?:script|img|link|iframe|source)\b[^>]*\b(?:src|href)=["']?(?:https?:)?//[^"'\s>]+""")


def pages_in(nav: list[Any]) -> list[str]:
    """The files that a navigation names, sections and all."""
    found: list[str] = []
    for entry in nav:
        target = next(iter(entry.values())) if isinstance(entry, dict) else entry
        found += pages_in(target) if isinstance(target, list) else [target]
    return found


def test_the_navigation_has_every_page_once_and_no_other() -> None:
    nav = pages_in(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    written = [str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")]
    generated = [f"reference/{name}.md" for name in PAGES]
    assert sorted(nav) == sorted({*written, *generated})


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what the site is made from, with its Reference written; to be built."""
    folder = tmp_path_factory.mktemp("site")
    shutil.copy(ROOT / "mkdocs.yml", folder)
    shutil.copytree(ROOT / "docs", folder / "docs", ignore=shutil.ignore_patterns("reference", "__pycache__"))
    for code in ("clients", "services", "deploy"):
        (folder / code).symlink_to(ROOT / code)
    write(folder / "docs/reference")
    return folder


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_loads_nothing_from_elsewhere(site: Path) -> None:
    built = subprocess.run(BUILD, cwd=site, capture_output=True, text=True, timeout=120)
    assert built.returncode == 0, built.stdout + built.stderr
    pages = sorted((site / "outputs/site").rglob("*.html"))
    assert {page.name for page in pages} >= {f"{name}.html" for name in PAGES}
    text = {str(page.relative_to(site)): page.read_text() for page in pages}
    assert {name: FOREIGN.findall(content) for name, content in text.items() if FOREIGN.search(content)} == {}
    assert [name for name, content in text.items() if 'class="mermaid"' in content] == []  # its script is on a CDN
    assert [*(site / "outputs/site").rglob("*.py")] == []


@pytest.mark.slow
@pytest.mark.extended  # builds the whole site again, to see that `--strict` of the site generator refuses
def test_a_link_to_no_page_to_no_heading_or_to_no_object_fails_the_build(site: Path) -> None:
    page = site / "docs/benchmarks.md"
    before = page.read_text()
    page.write_text(f"{before}\n[a](nowhere.md) [b](reference/errors.md#nowhere) [c][trackway.nothing]\n")
    built = subprocess.run(BUILD, cwd=site, capture_output=True, text=True, timeout=120)
    page.write_text(before)
    assert built.returncode != 0
    for problem in ("page does not exist", "anchor does not exist", "unresolved autoref", "3 issues found"):
        assert problem in built.stderr
