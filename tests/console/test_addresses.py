"""Addresses of the page that ask for what is not there, pages that are followed, and how seconds are written."""

from pathlib import Path
from urllib.parse import quote

import pytest

from tests.console import accessibility
from tests.console.browser import Browser
from tests.console.conftest import Serve
from tests.console.example_run import rollout, write_run
from trackway.trainer.run_state.trajectories import write_trajectories

pytestmark = [pytest.mark.slow, pytest.mark.program("chromium")]

PLACE = "run=tidy&step=2&sample=7&rollout=1"
DETAILS = "document.querySelector('.token-details').innerText"


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("step?run=tidy&step=x", 'expected a whole number from 0 as step in the address, got "x"'),
        ("step?run=tidy", "expected step=… in the address, got none; open the run to choose one"),
        ("run", "expected run=… in the address, got none; open the list of runs to choose one"),
        (f"tokens?{PLACE}&offset=-1", 'expected a whole number from 0 as offset in the address, got "-1"'),
        ("search?run=tidy&least=much", 'expected a number as least in the address, got "much"'),
        ("search?run=tidy&validation=maybe", "expected true or false as validation in the address"),
        (f"search?run=tidy&text={'a' * 1001}", "expected at most 1000 characters as text in the address, got 1001"),
        ("compare?run=tidy&of=1/7/0,1/%25/0", "expected step/sample/rollout in each part of of=… in the address"),
        ("compare?run=tidy&of=1/7/0,nonsense", 'got "nonsense"; open a trajectory of the run, then Compare'),
    ],
)
def test_an_address_that_cannot_be_says_what_was_expected_and_leads_back(
    browser: Browser, url: str, address: str, message: str
) -> None:
    browser.open(f"{url}#/{address}")

    assert browser.text().startswith("This address cannot be opened") and message in browser.text()
    browser.settled(lambda: browser.click(".problem a"))
    assert browser.evaluate("location.hash") == ("#/run?run=tidy" if "run=tidy" in address else "#/runs")
    assert browser.evaluate("!document.querySelector('.problem')")


def test_tokens_that_are_not_there_have_no_numbers(browser: Browser, url: str, outputs: Path) -> None:
    bare = rollout("tidy", 5, 7, 0)
    bare.prompt_ids, bare.response_ids, bare.response_mask, bare.response_logprobs = [], [], [], []
    bare.weight_versions, bare.turns = [], []
    write_trajectories(outputs / "tidy/trajectories/step_5.parquet", [bare])

    browser.open(f"{url}#/tokens?run=tidy&step=5&sample=7&rollout=0")
    assert "This row has no tokens." in browser.text() and browser.evaluate(DETAILS) == "There is none."
    browser.open(f"{url}#/tokens?{PLACE}&at=9999&offset=0")
    assert browser.evaluate(DETAILS) == "Token 9,999 is not on this page."
    browser.open(f"{url}#/tokens?{PLACE}&at=5")
    assert "place\n5 of 7, response" in browser.evaluate(DETAILS)
    browser.open(f"{url}#/tokens?{PLACE}&offset=9999")
    assert "This row has 7 tokens, and none at 9,999." in browser.text() and "of 7\n" not in browser.text()
    browser.settled(lambda: browser.click(".empty a"))
    assert browser.evaluate("document.querySelectorAll('.token[data-index]').length") == 7
    assert browser.problems == []


def test_seconds_are_whole_minutes_and_hours_with_their_sign(browser: Browser, url: str) -> None:
    browser.open(f"{url}#/")
    values = "[179.7, 10790, -5, 7199.7, 119.4, 3661, 0.0042].map(seconds)"
    assert browser.evaluate(f"import('{url}page/dom.js').then(({{seconds}}) => {values})") == [
        "3 min 0 s",
        "3 h 0 min",
        "-5.00 s",
        "2 h 0 min",
        "119.4 s",
        "61 min 1 s",
        "4.2 ms",
    ]


HURRY = "window.setTimeout = ((plain) => (act, ms) => plain(act, Math.min(ms, 50)))(window.setTimeout); true"
"""The page waits 50 ms where it would wait for seconds."""


def test_the_list_shows_a_run_that_starts_later_also_when_the_console_was_away(
    browser: Browser, tmp_path: Path, serve: Serve
) -> None:
    (tmp_path / "outputs").mkdir()
    url = serve(tmp_path / "outputs")
    browser.open(f"{url}#/")
    assert "There is no run in" in browser.text()
    browser.evaluate(HURRY)

    write_run(tmp_path / "outputs", "first")
    browser.wait("document.querySelectorAll('.runs tbody tr').length === 1")
    browser.call("Network.setBlockedURLs", urls=["*/api/*"])
    browser.wait("document.getElementById('trouble').innerText.includes('The console does not answer')")
    write_run(tmp_path / "outputs", "second")
    browser.call("Network.setBlockedURLs", urls=[])

    browser.wait("document.querySelectorAll('.runs tbody tr').length === 2")
    assert browser.evaluate("document.getElementById('trouble').hidden")
    assert accessibility.faults(browser) == []


def test_the_chosen_runs_stay_chosen_on_every_page_of_the_list(browser: Browser, tmp_path: Path, serve: Serve) -> None:
    for index in range(52):
        write_run(tmp_path / "outputs", f"r{index}", steps=1)
    url = serve(tmp_path / "outputs")
    names = (
        "[...document.querySelectorAll('main .panel:first-child .legend li')].map((item) => item.childNodes[1].data)"
    )

    browser.open(f"{url}#/runs?compare={quote('r1,r50')}")
    assert browser.evaluate(names) == ["r50", "r1"]
    browser.settled(lambda: browser.click("main p a.button"))  # older
    assert browser.evaluate(names) == ["r1", "r50"] and "51 to 52 of 52" in browser.text()
    browser.click("main .legend button")  # r50, which has no box on this page
    browser.click("input[value=r1]")
    browser.wait("!document.querySelector('main .legend li')")
    browser.settled(lambda: browser.evaluate("dispatchEvent(new Event('hashchange'))"))
    assert browser.evaluate("document.querySelectorAll('main .legend li').length") == 0

    browser.open(f"{url}#/runs?offset=9999")
    assert "There are 52 runs, and none after the first 9,999." in browser.text()
    browser.settled(lambda: browser.click(".empty a"))
    assert browser.evaluate("document.querySelectorAll('.runs tbody tr').length") == 50
    assert browser.problems == []


def test_a_system_page_without_answers_says_so_once(browser: Browser, tmp_path: Path, serve: Serve) -> None:
    url = serve(tmp_path, services={"tools": "http://127.0.0.1:9"})
    browser.open(f"{url}#/system")
    browser.evaluate(HURRY)
    asked = "performance.getEntriesByType('resource').filter(({name}) => name.includes('api/system')).length"
    before = browser.evaluate(asked)

    browser.call("Network.setBlockedURLs", urls=["*/api/*"])
    try:
        browser.wait(f"{asked} > {before} + 3 && !document.getElementById('trouble').hidden")
        assert browser.evaluate("document.querySelectorAll('[role=alert]:not([hidden])').length") == 1
    finally:
        browser.call("Network.setBlockedURLs", urls=[])
    browser.wait("document.getElementById('trouble').hidden")


def test_a_step_of_more_rollouts_than_one_reply_is_paged_and_compared_whole(
    browser: Browser, url: str, outputs: Path
) -> None:
    made = [rollout("tidy", 4, sample, 0) for sample in range(9000)]
    write_trajectories(outputs / "tidy/trajectories/step_4.parquet", made)
    last = rollout("tidy", 5, 8999, 0)
    assert last.reward is not None
    last.reward.score = 1.0
    write_trajectories(outputs / "tidy/trajectories/step_5.parquet", [last, rollout("tidy", 5, 8999, 1)])

    browser.open(f"{url}#/step?run=tidy&step=4&offset=8192")
    assert "rollouts 8,193 to 9,000 of 9,000" in browser.text()
    browser.evaluate(
        "[...document.querySelectorAll('a')].find((node) => node.innerText === '← earlier').id = 'earlier'"
    )
    assert "offset" not in browser.evaluate("document.getElementById('earlier').hash")
    browser.open(f"{url}#/step?run=tidy&step=4&offset=20000")
    assert "This step has 9,000 rollouts, and none after the first 20,000." in browser.text()
    browser.open(f"{url}#/step?run=tidy&step=5&since=4")
    assert "0 → 0.5, better" in browser.text()
    assert browser.problems == []
