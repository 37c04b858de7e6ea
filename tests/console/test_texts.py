"""Texts of models in the page: Markdown without markup, long ones folded, and the outline of a long trajectory."""

import json
from pathlib import Path

import pytest

from tests.console import accessibility
from tests.console.browser import Browser
from tests.console.example_run import HOSTILE, rollout
from trackway.trainer.run_state.trajectories import write_trajectories
from trackway.wire.chat import FunctionCall, Message, ToolCall
from trackway.wire.errors import ErrorCode
from trackway.wire.trajectory import ToolCallRecord, Trajectory, Turn

pytestmark = [pytest.mark.slow, pytest.mark.program("chromium")]

PLACE = "trajectory?run=tidy&step=4&sample=1&rollout=0"
CODE = "def add(a, b):\n    return a + b\n"


def drawn(browser: Browser, text: str) -> list[str]:
    """Each block's tag and class, and its text."""
    block = "(node) => `${node.tagName.toLowerCase()}.${node.className}: ${node.textContent}`"
    return browser.evaluate(
        f"import('./page/markdown.js').then((it) => [...it.markdown({json.dumps(text)}).children].map({block}))"
    )


@pytest.mark.parametrize(
    "text, blocks",
    [
        ("one\ntwo\n\nthree\n", ["p.: one\ntwo\n\nthree"]),
        ("```py\nx = 1\n\n  y\n```\nafter", ["pre.code: x = 1\n\n  y", "p.: after"]),
        ("~~~\na ``` b\n~~~", ["pre.code: a ``` b"]),
        ("````\n```\nx\n```\n````", ["pre.code: ```\nx\n```"]),
        ("```\nnever closed", ["pre.code: never closed"]),
        ("#### 42", ["p.strong: #### 42"]),
        ("#hash", ["p.: #hash"]),
        ("- a\n  - b\n12. c", ["p.item: -a", "p.item: -b", "p.item: 12.c"]),
        ("-7 is\n- ", ["p.: -7 is\n-"]),
        ("> a\n> b", ["p.quote: a\nb"]),
        ("| a | b |\n|---|---|", ["pre.code: | a | b |\n|---|---|"]),
        ("", []),
    ],
)
def test_markdown_is_drawn_as_blocks(browser: Browser, url: str, text: str, blocks: list[str]) -> None:
    browser.open(f"{url}#/")

    assert drawn(browser, text) == blocks


@pytest.mark.parametrize(
    "text",
    [
        "~" * 400_000 + "`",
        "a" + " " * 400_000 + "b",
        "**a " * 100_000,
        " ".join("`" * length for length in range(1, 880)),
    ],
)
def test_a_text_that_makes_expressions_go_back_is_drawn_in_time(browser: Browser, url: str, text: str) -> None:
    browser.open(f"{url}#/")
    blocks = drawn(browser, text)  # or the request of the page ends by its deadline

    assert [block.partition(" ")[0] for block in blocks] == ["p.:"]


def test_markdown_within_a_line_is_code_and_bold_and_nothing_else(browser: Browser, url: str) -> None:
    browser.open(f"{url}#/")
    line = "`a*b` **bold** 2**3**4 *x* [link](javascript:alert(1)) ``a ` b`` `open"
    text = f"{line}\n```{HOSTILE}\n{HOSTILE}\n```\n# {HOSTILE}"
    made = browser.evaluate(
        f"import('./page/markdown.js').then(({{markdown}}) => {{ const it = markdown({json.dumps(text)}); return "
        "[[...it.querySelectorAll('*')].map((node) => node.tagName).join(' '), "
        "[...it.querySelectorAll('code, b')].map((node) => node.textContent), it.textContent]; })"
    )

    assert made[:2] == ["P CODE B CODE PRE P", ["a*b", "bold", "a ` b"]]
    assert made[2].count(HOSTILE) == 2 and "2**3**4 *x* [link](javascript:alert(1))" in made[2]
    assert "taken" not in browser.evaluate("document.title") and browser.problems == []


@pytest.mark.parametrize(
    "text, shown",
    [
        ("👨‍👩‍👧 ❤️‍🔥 👩🏽‍💻", "👨‍👩‍👧 ❤️‍🔥 👩🏽‍💻"),
        ("a\u200db \u200d", "a\\u200db \\u200d"),
        ("\u202eabc\ufeff", "\\u202eabc\\ufeff"),
        ("a\x1b\tb", "a␛\tb"),
    ],
)
def test_what_cannot_be_seen_is_shown_as_its_code_but_emoji_stay_whole(
    browser: Browser, url: str, text: str, shown: str
) -> None:
    browser.open(f"{url}#/")

    assert browser.evaluate(f"import('./page/dom.js').then(({{visible}}) => visible({json.dumps(text)}))") == shown


def long_trajectory(turns: int = 30) -> Trajectory:
    """A shell call in each turn but the last: the first has a long result, the third failed, the fourth writes code."""
    made = rollout("tidy", 4, 1, 0)
    rules = "\n".join(f"{number}. rule" for number in range(40))
    made.prompt_messages = [Message(role="system", content=rules), Message(role="user", content="Fix **it**.")]
    made.turns = []
    for index in range(turns - 1):
        arguments = {"path": "add.py", "content": CODE} if index == 3 else {"command": "make"}
        call = ToolCall(id=f"c{index}", function=FunctionCall(name="shell", arguments=json.dumps(arguments)))
        record = ToolCallRecord(
            tool="shell", tool_call_id=call.id, error=ErrorCode.TOOL_FAILED if index == 2 else None, seconds=0.5
        )
        result = "\n".join(f"line {number}" for number in range(200)) if index == 0 else "done"
        messages = [
            Message(role="assistant", content="", tool_calls=[call]),
            Message(role="tool", content=result, tool_call_id=call.id, name="shell"),
        ]
        made.turns.append(
            Turn(
                index=index,
                messages=messages,
                response_start=0,
                response_end=4 if index else 2,
                finish_reason="stop",
                calls_executed=1,
                calls=[record],
            )
        )
    last = Message(role="assistant", content="**Done**\nin two lines\n\n```\nmake\n```")
    made.turns.append(Turn(index=turns - 1, messages=[last], response_start=4, response_end=5, finish_reason="stop"))
    return made


@pytest.fixture
def opened(browser: Browser, url: str, outputs: Path) -> Browser:
    write_trajectories(outputs / "tidy/trajectories/step_4.parquet", [long_trajectory()])
    browser.open(f"{url}#/{PLACE}")
    return browser


IS_OPEN = "[...document.querySelectorAll('[id^=turn-]')].map((turn) => Number(turn.open)).join('')"
HEIGHT = "document.querySelector('%s').getBoundingClientRect().height"


def test_turns_amid_a_long_trajectory_are_closed_and_the_outline_opens_one(opened: Browser) -> None:
    assert opened.evaluate(IS_OPEN) == "1" * 5 + "0" * 22 + "1" * 3
    entries = opened.evaluate("[...document.querySelectorAll('.outline li')].map((li) => li.innerText.split(/\\s+/))")
    assert entries[:4] == [["system"], ["user"], ["1", "shell", "2"], ["2", "shell", "4"]]
    assert len(entries) == 32 and entries[-1] == ["30", "stop", "1"]
    assert opened.evaluate("[...document.querySelectorAll('.outline .bad-text')].map((b) => b.innerText)[0]")[0] == "3"

    opened.click(".outline li:nth-child(17) button")  # turn 15
    assert opened.evaluate(IS_OPEN)[14] == "1"
    assert opened.evaluate("document.activeElement.parentNode.id") == "turn-15"
    opened.wait("(({top}) => top >= 50 && top < 120)(document.getElementById('turn-15').getBoundingClientRect())")
    opened.click(".outline .panel-head button")
    assert opened.evaluate(IS_OPEN) == "1" * 30 and opened.problems == []


def test_a_long_prompt_and_a_long_result_are_folded_until_they_are_opened(opened: Browser) -> None:
    folds = "[...document.querySelectorAll('.fold > button')].map((button) => button.innerText)"
    assert opened.evaluate(folds) == ["Show all 40 lines", "Show all 200 lines"]
    assert opened.evaluate(HEIGHT % "#turn-1 .result pre") <= 150

    opened.click("#turn-1 .fold > button")

    assert opened.evaluate(folds) == ["Show all 40 lines", "Show less"]
    assert opened.evaluate(HEIGHT % "#turn-1 .result pre") > 2000


def test_code_in_arguments_has_its_lines_and_a_key_shows_texts_as_written(opened: Browser) -> None:
    code = "document.querySelector('#turn-4 pre.code')?.textContent"
    last = "document.querySelector('#turn-30 > :last-child').innerText"
    assert opened.evaluate(code) == CODE
    assert opened.evaluate(last) == "Done\nin two lines\n\nmake"

    opened.press("m")
    assert opened.evaluate(code) is None
    assert opened.evaluate(last) == "**Done**\nin two lines\n\n```\nmake\n```"
    written = json.dumps({"path": "add.py", "content": CODE})
    assert opened.evaluate("document.querySelector('#turn-4 pre.call').textContent") == written
    opened.press("m")
    assert opened.evaluate(code) == CODE


def test_a_failed_call_shows_its_message_once_also_where_the_model_never_saw_it(
    browser: Browser, url: str, outputs: Path
) -> None:
    message = f"the disk is full {HOSTILE}"
    unseen, seen = rollout("tidy", 4, 1, 0), rollout("tidy", 4, 1, 1)
    for made in (unseen, seen):
        made.turns[0].calls[0] = (
            made.turns[0].calls[0].model_copy(update={"error": ErrorCode.TOOL_FAILED, "message": message})
        )
    del unseen.turns[0].messages[1]
    seen.turns[0].messages[1].content = f"Error executing tool 'calculator': {message}"
    write_trajectories(outputs / "tidy/trajectories/step_4.parquet", [unseen, seen])

    for n in (0, 1):
        browser.open(f"{url}#/trajectory?run=tidy&step=4&sample=1&rollout={n}")
        card = browser.evaluate("document.querySelector('.tool-card').innerText")
        assert (card.count(message), card.count("Error executing tool")) == (1, n)
    assert browser.problems == []


@pytest.mark.parametrize("width", [390, 1000, 1440])
def test_a_long_trajectory_fits_each_screen(opened: Browser, width: int) -> None:
    for dark in (False, True):
        opened.size(width, dark=dark)
        assert opened.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert accessibility.faults(opened) == []
    boxes = "[...document.querySelectorAll('.split > *')].map((node) => node.getBoundingClientRect())"
    outline, texts, aside = opened.evaluate(
        f"{boxes}.map(({{left, right, top, bottom}}) => [left, right, top, bottom])"
    )
    assert outline[3] <= texts[2] or outline[1] <= texts[0]
    assert texts[3] <= aside[2] or texts[1] <= aside[0]
