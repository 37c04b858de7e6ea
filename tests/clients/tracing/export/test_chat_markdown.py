"""Texts that MLflow renders as Markdown: their lines stay, no line is a heading, and unescaping restores the text."""

import pytest

from trackway.tracing.export.chat_markdown import escaped, unescaped


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("#### 16", "\u200b#### 16"),
        ("So:\n#### 16\n", "So:  \n\u200b#### 16  \n"),
        ("   # a\n    # code\n#tag\n####### seven", "\u200b   # a  \n    # code  \n#tag  \n####### seven"),
        ("one\n\ntwo", "one  \n\ntwo"),
        ("see\n```python\n# comment\nx = 1\n```\n# done", "see  \n```python\n# comment\nx = 1\n```\n\u200b# done"),
        ("ends in two  \nspaces  ", "ends in two    \nspaces  "),
        ("", ""),
    ],
)
def test_lines_are_kept_and_none_is_a_heading(text: str, expected: str) -> None:
    assert escaped(text) == expected
    assert unescaped(expected) == text
