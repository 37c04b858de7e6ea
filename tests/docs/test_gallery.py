"""docs/start/examples.md: it is what the generator makes of the examples, and has all of them."""

from generators.gallery import GROUPS, PAGE, ROOT, files, first_line, gallery


def test_the_page_is_made_from_the_examples():
    assert PAGE.read_text() == gallery(), "run: cd docs && python -m generators.gallery"


def test_every_example_is_on_it_and_says_what_it_is():
    shown = [path for group in GROUPS for path in files(group)]
    folders = {path.parent for path in shown if path.name == "README.md"}
    programs = [path for kind in ("py", "ipynb", "yaml") for path in (ROOT / "examples").rglob(f"*.{kind}")]

    assert {path for path in programs if not folders & {*path.parents}} <= {*shown}
    assert [str(path) for path in shown if len(first_line(path)) < 15] == []
