"""docs/llms.txt, which programs read: it is what the generator makes of the pages."""

import re

from generators.llms import DOCS, llms


def test_it_lists_every_page_of_the_navigation_with_a_sentence():
    assert (DOCS / "llms.txt").read_text() == llms(), "run: cd docs && python -m generators.llms"


def test_each_link_leads_to_a_page():
    links = re.findall(r"^- \[[^\n]+\]\(([^)]+)\): \S", llms(), flags=re.MULTILINE)

    assert len(links) == llms().count("\n- ") > 30
    assert [link for link in links if not (DOCS / link).is_file()] == []
