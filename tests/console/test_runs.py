"""Several runs in the page: a metric over them, and the same row in each."""

from pathlib import Path

import pytest

from tests.console.browser import Browser
from tests.console.example_run import rollout, write_evaluation, write_run
from trackway.run_config import compose
from trackway.trainer.run_state.folder import RunFolder
from trackway.trainer.run_state.trajectories import write_trajectories
from trackway.trainer.service_urls import ServiceUrls
from trackway.wire.trainer import MetricsRow, RunState
from trackway.wire.trajectory import Reward

pytestmark = [pytest.mark.slow, pytest.mark.program("chromium")]

CHARTS = "[...document.querySelectorAll('.chart')].map((chart) => chart.ariaLabel)"
HEADS = "[...document.querySelectorAll('.compare a.strong')].map((a) => a.parentNode.innerText.split('\\n').join(', '))"


def line(name: str) -> str:
    """The values of a named line of a comparison."""
    start = f"[...document.querySelectorAll('.row-name')].find((node) => node.innerText === '{name}')"
    return (
        f"(() => {{ const found = []; let node = {start}.nextElementSibling; while (node?.className === 'column') "
        "{ found.push(node.innerText); node = node.nextElementSibling; } return found; })()"
    )


def test_any_metric_is_drawn_over_the_chosen_runs(browser: Browser, url: str, outputs: Path) -> None:
    for name, values in (("first", [1.0, 2.0]), ("second", [3.0, 4.0]), ("third", [])):
        folder = write_run(outputs, name, steps=0)
        for step, value in enumerate(values, 1):
            folder.append_row(MetricsRow(step=step, timestamp=1000 + step, data={"actor/kl": value}))
    browser.open(f"{url}#/runs?compare=first,third")

    browser.write("#metric", "actor/kl")
    browser.press("Enter")
    browser.wait(f"{CHARTS}.at(-1) === 'actor/kl: steps 1 to 2, newest –, 2'")
    browser.click("input[value=second]")
    browser.wait(f"{CHARTS}.at(-1) === 'actor/kl: steps 1 to 2, newest –, 4, 2'")
    assert browser.evaluate("location.hash") == "#/runs?compare=first%2Cthird%2Csecond&metrics=actor%2Fkl"
    browser.open(f"{url}#/runs?compare=first&metrics=actor/kl")
    assert browser.evaluate(CHARTS)[-1] == "actor/kl: steps 1 to 2, newest 2"

    browser.click("button[aria-label='remove actor/kl']")
    browser.wait("document.getElementById('main').innerText.includes('Choose a metric')")
    assert browser.problems == []


def test_a_validation_that_reports_pass_at_k_has_its_chart(browser: Browser, url: str, outputs: Path) -> None:
    rates = {f"val-aux/gsm8k/acc/pass@{k}": k / 16 for k in (2, 4, 16)}
    RunFolder(outputs / "tidy").append_row(MetricsRow(step=3, timestamp=1003, data=rates))
    browser.open(f"{url}#/run?run=tidy")

    assert "pass@k: steps 3 to 3, newest 0.125, 0.25, 1" in browser.evaluate(CHARTS)
    assert "pass@2\n0.125\npass@4\n0.25\npass@16\n1" in browser.text()


def test_the_same_row_of_another_run_is_put_beside_a_rollout(browser: Browser, url: str, outputs: Path) -> None:
    write_run(outputs, "other", steps=3)
    older = rollout("older", 1, 7, 5, text="Another question?")
    older.reward = Reward(score=0.5, answer="41")
    write_trajectories(write_run(outputs, "older", steps=0).path / "trajectories/step_1.parquet", [older])
    write_run(outputs, "bare", steps=0)
    browser.open(f"{url}#/trajectory?run=tidy&step=2&sample=7&rollout=1")
    browser.settled(lambda: browser.click("a[title='the same row in another run']"))

    browser.write("#other", "bare")
    browser.press("Enter")
    browser.wait("document.getElementById('main').innerText.includes('Run bare has no training rollout of sample 7.')")
    browser.evaluate("document.querySelector('#other').value = ''")
    browser.write("#other", "other")
    browser.press("Enter")
    browser.wait("location.hash === '#/compare?run=tidy&of=2%2F7%2F1%2C2%2F7%2F1%2Fother'")
    browser.settled(lambda: None)
    assert browser.evaluate(HEADS) == ["tidy, step 2 · 7 · 1 reward 1", "other, step 2 · 7 · 1 reward 1"]
    assert "Their prompts differ" not in browser.text()

    browser.write("#other", "older")  # which has the row in another step, with another number
    browser.press("Enter")
    browser.wait("location.hash.endsWith('%2C1%2F7%2F5%2Folder')")
    browser.settled(lambda: None)
    assert browser.evaluate(HEADS)[2].startswith("older, step 1 · 7 · 5 reward 0.5")
    assert browser.evaluate(line("answer")) == ["–", "–", "41"]
    assert browser.evaluate(line("ground truth")) == ["42", "42", "42"]
    assert "Their prompts differ: these runs may have other data files" in browser.text()
    browser.settled(lambda: browser.click(".compare a.strong[href*='older']"))
    assert browser.evaluate("location.hash") == "#/trajectory?run=older&step=1&sample=7&rollout=5"
    assert browser.problems == []


def test_a_row_of_evaluations_leads_to_its_rollouts_side_by_side(browser: Browser, url: str, outputs: Path) -> None:
    for name, score in (("eval-a", 1.0), ("eval-b", 0.0)):
        write_evaluation(outputs / name, {3: [score, 0.0]})
    browser.open(f"{url}#/evaluations?run=eval-a")

    browser.settled(lambda: browser.click(".evaluations tbody th a"))

    assert browser.evaluate(HEADS) == ["eval-a, v0 · 3 · 0 reward 1", "eval-b, v0 · 3 · 0 reward 0"]
    assert browser.evaluate(line("reward")) == ["1", "0"] and browser.problems == []


def test_two_active_runs_are_listed_as_active_each_with_its_policy(browser: Browser, url: str, outputs: Path) -> None:
    for name, policy in (("first", None), ("second", "second")):
        folder = RunFolder(outputs / name)
        urls = ServiceUrls(agent_url="http://a", tools_url="http://t", weights_url="w")
        folder.create(compose([f"trainer.experiment_name={name}"]), urls, total_steps=9)
        folder.move(RunState.RUNNING)
        folder.update(step=1, policy=policy)
    cells = "[...row.cells].slice(1, 3).map((cell) => cell.innerText)"
    rows = f"[...document.querySelectorAll('tbody tr')].map((row) => {cells})"
    browser.open(f"{url}#/runs")

    listed = dict(browser.evaluate(rows))
    assert (listed["first"], listed["second"]) == ("running", "running\npolicy second")
    browser.open(f"{url}#/run?run=second")
    assert "step 1 of 9 · policy second · " in browser.text()
    browser.open(f"{url}#/run?run=first")
    assert "step 1 of 9 · /" in browser.text()
    assert browser.problems == []
