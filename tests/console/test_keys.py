"""Keys that are pressed, and trajectories that are chosen to be compared."""

from pathlib import Path

import pytest

from tests.console import accessibility
from tests.console.browser import Browser
from tests.console.example_run import rollout
from trackway.trainer.run_state.trajectories import write_trajectories

pytestmark = [pytest.mark.slow, pytest.mark.program("chromium")]

FOCUSED = "document.activeElement.ariaLabel?.split('\\n')[0]"


def test_the_key_t_changes_between_a_trajectory_and_its_tokens(browser: Browser, url: str) -> None:
    place = "run=tidy&step=2&sample=7&rollout=1"
    browser.open(f"{url}#/trajectory?{place}")

    browser.settled(lambda: browser.press("t"))
    browser.wait(f"location.hash === '#/tokens?{place}'")
    browser.settled(lambda: None)
    browser.settled(lambda: browser.press("t"))
    browser.wait(f"location.hash === '#/trajectory?{place}'")


def test_keys_move_in_a_grid_and_open_a_cell(browser: Browser, url: str, outputs: Path) -> None:
    rollouts = [rollout("tidy", 4, sample, n) for sample in range(1, 5) for n in (0, 1)]
    write_trajectories(outputs / "tidy/trajectories/step_4.parquet", rollouts)
    browser.size(390)  # one group below the other
    browser.open(f"{url}#/step?run=tidy&step=4")
    browser.evaluate("document.querySelector('.rollouts .cell').focus()")

    seen = []
    for key in ("ArrowRight", "ArrowDown", "ArrowDown", "ArrowUp", "End", "Home"):
        browser.press(key)
        seen.append(browser.evaluate(FOCUSED))
    assert seen == [
        "sample 1, rollout 1",
        "sample 2, rollout 1",
        "sample 3, rollout 1",
        "sample 2, rollout 1",
        "sample 4, rollout 1",
        "sample 1, rollout 0",
    ]
    browser.press("ArrowDown")
    browser.press("Enter")
    browser.wait("location.hash === '#/trajectory?run=tidy&step=4&sample=2&rollout=0'")
    assert browser.problems == []


def test_rollouts_of_a_grid_are_chosen_by_a_key_and_compared(browser: Browser, url: str) -> None:
    browser.open(f"{url}#/step?run=tidy&step=2")
    browser.evaluate("document.querySelector('.rollouts .cell').focus()")
    for key in ("c", "ArrowRight", "c", "End", "c", "c"):
        browser.press(key)
    assert browser.evaluate("document.querySelectorAll('.cell.chosen').length") == 2
    assert accessibility.faults(browser) == []

    browser.settled(lambda: browser.click(".histogram button:last-child"))  # the page is drawn again
    assert browser.evaluate("document.querySelectorAll('.cell.chosen').length") == 2
    browser.open(f"{url}#/step?run=tidy&step=1")
    assert browser.evaluate("document.querySelectorAll('.cell.chosen').length") == 0 and "2 chosen" in browser.text()
    browser.settled(lambda: browser.click(".chosen a.button"))
    browser.wait("location.hash === '#/compare?run=tidy&of=2%2F7%2F0%2C2%2F7%2F1'")


def test_rollouts_of_a_prompt_are_chosen_over_steps_while_its_page_grows(
    browser: Browser, url: str, outputs: Path
) -> None:
    browser.open(f"{url}#/prompt?run=tidy&sample=7")
    browser.evaluate("document.querySelector('.by-step .cell').focus()")
    browser.press("c")
    browser.settled(lambda: browser.evaluate("dispatchEvent(new Event('hashchange'))"))  # drawn again
    assert browser.evaluate("document.querySelector('.cell.chosen').hash").endswith("step=1&sample=7&rollout=0")
    browser.evaluate("document.querySelector('.by-step-row:last-child .cell').focus()")
    browser.press("c")

    browser.settled(lambda: browser.click(".chosen a.button"))
    browser.wait("location.hash === '#/compare?run=tidy&of=1%2F7%2F0%2C2%2F7%2F0'")


def test_hits_of_a_search_are_chosen_and_compared(browser: Browser, url: str) -> None:
    browser.open(f"{url}#/search?run=tidy&text=%23%23%23%23%2042")
    browser.wait("document.querySelectorAll('table.hits tbody tr').length === 2")
    browser.click("table.hits tr:first-child input")
    assert "1 chosen" in browser.text() and "Compare chosen" not in browser.text()
    browser.click("table.hits tr:last-child input")

    browser.settled(lambda: browser.click(".chosen a.button"))
    browser.wait("location.hash === '#/compare?run=tidy&of=2%2F7%2F1%2C1%2F7%2F1'")
    browser.settled(lambda: None)
    assert browser.text().startswith("2 trajectories") and browser.problems == []


def test_what_an_expression_found_is_marked_and_blanks_are_part_of_a_text(browser: Browser, url: str) -> None:
    marks = "[...document.querySelectorAll('table.hits mark')].map((node) => node.innerText)"
    browser.open(f"{url}#/search?run=tidy&regex=1&text=%23%2B%20%5B24%5D%2B")
    browser.wait("document.querySelectorAll('table.hits tbody tr').length === 2")
    assert browser.evaluate(marks) == ["#### 42", "#### 42"]

    browser.open(f"{url}#/search?run=tidy")
    browser.write("input[name=text]", "HOW much ")
    browser.settled(lambda: browser.press("Enter"))
    assert browser.evaluate("location.hash") == "#/search?run=tidy&text=HOW+much+"
    browser.wait("document.querySelectorAll('table.hits tbody tr').length > 4")
    assert set(browser.evaluate(marks)) == {"How much "}
    browser.open(f"{url}#/search?run=tidy&text=42%20%20")
    browser.wait("document.getElementById('main').innerText.includes('Nothing fits')")


def test_the_strip_of_a_group_opens_rollouts_by_their_numbers(browser: Browser, url: str, outputs: Path) -> None:
    made = [rollout("tidy", 4, 10, n) for n in (0, 2, 5)]  # rollout 0 of sample 10 failed
    write_trajectories(outputs / "tidy/trajectories/step_4.parquet", made)
    browser.open(f"{url}#/trajectory?run=tidy&step=4&sample=10&rollout=5")

    assert browser.evaluate(
        "[...document.querySelectorAll('.strip .cell')].map((a) => [a.innerText, a.hash.slice(-1)])"
    ) == [
        ["!", "0"],
        ["0", "2"],
        ["0", "5"],
    ]
    assert browser.evaluate("document.querySelector('.strip .current').hash").endswith("rollout=5")


def test_on_a_phone_the_numbers_of_a_token_are_in_view(browser: Browser, url: str, outputs: Path) -> None:
    long = rollout("tidy", 4, 7, 0)
    long.response_ids, long.response_mask, long.response_logprobs = [3] * 1500, [1] * 1500, [-0.5] * 1500
    write_trajectories(outputs / "tidy/trajectories/step_4.parquet", [long])
    browser.size(390, 800)
    browser.open(f"{url}#/tokens?run=tidy&step=4&sample=7&rollout=0")
    browser.evaluate("document.querySelector('[data-index=\"700\"]').focus()")

    edges = "(({top, bottom}) => [top, bottom])(document.querySelector('%s').getBoundingClientRect())"
    panel, token = (browser.evaluate(edges % name) for name in (".token-now", '[data-index="700"]'))
    assert "place\n700 of 1,502" in browser.evaluate("document.querySelector('.token-details').innerText")
    assert 0 <= token[0] < token[1] <= panel[0] < panel[1] <= 800  # the token is above its numbers
    assert accessibility.faults(browser) == []
