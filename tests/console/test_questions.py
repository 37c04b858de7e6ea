"""Nine questions about a run, each answered as a person would: from the list of runs, in at most four clicks."""

from collections.abc import Callable

import pytest

from tests.console.browser import Browser
from tests.console.conftest import Serve
from tests.console.example_run import write_run, write_values
from trackway.trainer.run_state.folder import Activity, RunFolder
from trackway.trainer.run_state.trajectories import read_trajectories, write_trajectories
from trackway.wire.errors import ErrorBody, ErrorCode
from trackway.wire.trajectory import StopReason, Trajectory

pytestmark = [pytest.mark.slow, pytest.mark.program("chromium")]

STEPS = 30
MOST_CLICKS = 4
LOST = ErrorBody(code=ErrorCode.ENGINE_FAILED, message="the engine of rollout replica 3 ended", retryable=False)


class Person:
    """Clicks from the list of runs, and counts."""

    def __init__(self, browser: Browser, url: str) -> None:
        self._browser = browser
        self._clicks = 0
        browser.open(f"{url}#/")

    def click(self, selector: str) -> "Person":
        """One click, and a look at what it opens."""
        self._clicks += 1
        assert self._clicks <= MOST_CLICKS
        before = self._browser.evaluate("document.getElementById('main').dataset.ready")
        self._browser.click(selector)
        self._browser.wait(f"document.getElementById('main').dataset.ready !== {before!r}")
        return self

    def link(self, text: str, beside: str = "") -> "Person":
        """A click on the first link or button with this text, or on that in the row of a table that begins so."""
        # A page that still reads is drawn again, and a click on a node that goes meanwhile is none.
        still_reading = (
            "[...document.querySelectorAll('#main [role=status]')].some((node) => / …$/.test(node.innerText))"
        )
        self._browser.wait(f"!{still_reading}")
        within = f"[...document.querySelectorAll('tr')].find((row) => row.innerText.startsWith({beside!r}))"
        self._browser.evaluate(
            f"[...{within if beside else 'document'}.querySelectorAll('a, button')].find((node) => "
            f"node.textContent.trim() === {text!r})?.setAttribute('data-chosen', '{self._clicks}')"
        )
        return self.click(f"[data-chosen='{self._clicks}']")

    def choose(self, label: str, value: str) -> "Person":
        """A choice from a list, which counts as a click."""
        self._clicks += 1
        assert self._clicks <= MOST_CLICKS
        field = f"document.querySelector('select[aria-label=\"{label}\"]')"
        self._browser.settled(
            lambda: self._browser.evaluate(f"{field}.value = {value!r}; {field}.dispatchEvent(new Event('change'))")
        )
        return self

    def write(self, label: str, text: str) -> "Person":
        """A text and Enter in a field, which counts as a click."""
        self._clicks += 1
        assert self._clicks <= MOST_CLICKS
        self._browser.write(f"input[aria-label='{label}']", text)
        self._browser.settled(lambda: self._browser.press("Enter"))
        return self

    def run(self) -> "Person":
        return self.link("tidy")

    def step(self, step: int) -> "Person":
        return self.run().link(str(step))

    def sees(self, *texts: str) -> None:
        """All of these are visible, at once or after a search."""
        for text in texts:
            self._browser.wait(f"document.getElementById('main').innerText.includes({text!r})")

    def value(self, script: str) -> object:
        return self._browser.evaluate(script)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, serve: Serve) -> str:
    outputs = tmp_path_factory.mktemp("outputs")
    folder = write_run(outputs, steps=STEPS)
    write_run(outputs, "another")
    change(folder, 20, lambda made: made.reward.__setattr__("score", 0.0) if made.reward else None)
    change(folder, 12, _lose)
    change(folder, 14, _search)
    change(folder, 15, _answer)
    change(folder, STEPS, _wait)
    write_values(folder, STEPS)
    folder.write_activity(Activity(rollouts={"submitted": 124, "used": 117, "dropped_stale": 7}))
    return serve(outputs)


def change(folder: RunFolder, step: int, apply: Callable[[Trajectory], object]) -> None:
    file = folder.path / f"trajectories/step_{step}.parquet"
    rollouts = read_trajectories(file)
    for made in rollouts:
        apply(made)
    write_trajectories(file, rollouts)


def _lose(made: Trajectory) -> None:
    if (made.tags.sample_index, made.tags.rollout_n) == (7, 0):
        made.error, made.stop_reason, made.reward = LOST, StopReason.ERROR, None


def _search(made: Trajectory) -> None:
    if (made.tags.sample_index, made.tags.rollout_n) == (10, 0):
        made.turns[0].calls.append(made.turns[0].calls[0].model_copy(update={"tool": "search"}))


def _answer(made: Trajectory) -> None:
    if (made.tags.sample_index, made.tags.rollout_n) == (7, 0):
        made.turns[-1].messages[-1].content = "#### 21"


def _wait(made: Trajectory) -> None:
    if (made.tags.sample_index, made.tags.rollout_n) == (10, 1):
        made.timings.tool_calls, made.timings.total = 60.0, 64.0


@pytest.fixture
def person(browser: Browser, url: str) -> Person:
    return Person(browser, url)


def test_which_prompts_got_worse_from_step_10_to_20(person: Person) -> None:
    person.step(20).write("Change since a step", "10")
    person.sees("0.5 → 0, worse", "0 → 0, as before")
    assert person.value("document.querySelector('.group .strong').textContent") == "7"


def test_reward_0_though_the_tool_was_right(person: Person) -> None:
    person.run().link("Search").link("tool right, answer wrong").sees("28 hits")
    assert person.value("[...document.querySelectorAll('table.hits a.open')].every((a) => a.textContent === '7 · 0')")


def test_groups_without_variance(person: Person) -> None:
    person.step(30).choose("Which prompts", "flat").sees("no variance")
    assert person.value("[...document.querySelectorAll('.group .strong')].map((a) => a.textContent).join()") == "10"


def test_what_failed_by_infrastructure_and_where(person: Person) -> None:
    person.run().link("Failures").link("infrastructure").sees("engine failed", "the engine of rollout replica 3 ended")
    where = "[...document.querySelectorAll('.causes tr')].map((row) => row.querySelector('.chip')?.textContent)"
    assert person.value(f"{where}.filter(Boolean)") == ["rollout", "tools"]  # and calls that were sent again
    person.link("step 12 · 7 · 0").sees("the engine of rollout replica 3 ended")
    assert "step=12" in str(person.value("location.hash"))


def test_the_longest_waits_of_a_step_and_their_cause(person: Person) -> None:
    person.step(30)
    first = "document.querySelector('.slowest li').innerText"
    assert str(person.value(first)).split("\n") == ["10 · 1", "64.0 s", "94 % tools"]


def test_which_weight_versions_wrote_a_trajectory(person: Person) -> None:
    person.step(30).click(".cell").sees("version 30, 31")


def test_one_prompt_at_steps_1_15_and_30(person: Person) -> None:
    person.step(30).link("7")
    rows = "[...document.querySelectorAll('.by-step-row')].map((row) => row.innerText.split('\\n').filter(Boolean))"
    by_step = person.value(f"Object.fromEntries({rows}.map(([step, ...said]) => [step, said]))")
    assert isinstance(by_step, dict) and len(by_step) == STEPS
    assert [by_step[f"step {step}"] for step in (1, 15, 30)] == [
        ["0", "1", "#### 13   #### 42"],
        ["0", "1", "#### 21   #### 42"],
        ["0", "1", "#### 13   #### 42"],
    ]
    person.link("Compare over steps").sees("step 1 · 7 · 0", "step 30 · 7 · 0")


def test_every_time_out_of_one_tool(person: Person) -> None:
    person.run().link("Failures").link("find all", beside="tool timeout · calculator").sees("30 hits")
    steps = "[...document.querySelectorAll('table.hits a.open')].map((a) => a.hash.match(/step=(\\d+)/)[1]).join()"
    assert person.value(steps) == ",".join(str(step) for step in range(STEPS, 0, -1))


def test_how_many_rollouts_were_dropped_as_stale(person: Person) -> None:
    person.run().sees("dropped stale\n7")
