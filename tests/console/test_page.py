"""The console's page in a real browser, from the list of runs to a token."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.console import accessibility
from tests.console.browser import Browser
from tests.console.conftest import Serve
from tests.console.example_run import (
    HOSTILE,
    TRACE_ID,
    mlflow_span,
    rollout,
    write_evaluation,
    write_remax_step,
    write_run,
    write_step,
)
from tests.serving import answered_by
from trackway.console import over_steps
from trackway.trainer.run_state.folder import Activity, RunFolder
from trackway.trainer.run_state.trajectories import read_trajectories, write_trajectories
from trackway.wire.service import Wait
from trackway.wire.trainer import MetricsRow
from trackway.wire.trajectory import Trajectory

pytestmark = [pytest.mark.slow, pytest.mark.program("chromium")]


def test_clicks_and_keys_lead_from_the_runs_to_a_token_and_back(browser: Browser, url: str, outputs: Path) -> None:
    browser.open(f"{url}#/")
    assert browser.text().splitlines()[0] == "Runs"
    assert browser.evaluate("document.getElementById('tools').innerText") == ""  # no services: no System, no Try

    browser.settled(lambda: browser.click("a.open"))
    assert browser.evaluate("location.hash") == "#/run?run=tidy"
    browser.settled(lambda: browser.click(".steps a[aria-label^='step 2']"))
    assert "without variance" in browser.text() and "1 of 2" in browser.text()
    browser.settled(lambda: browser.click(".histogram button:last-child"))  # reward 1
    assert browser.evaluate("document.querySelectorAll('.cell:not(.faded)').length") == 1
    browser.settled(lambda: browser.click(".cell:not(.faded)"))
    assert browser.evaluate("location.hash") == "#/trajectory?run=tidy&step=2&sample=7&rollout=1"
    assert "#### 42" in browser.text() and '{"expression": "7*6"}' in browser.text()
    traces = browser.evaluate("[...document.querySelectorAll('.title a[target]')].map((link) => link.href)")
    assert [address.partition("#")[0] for address in traces] == [
        "http://127.0.0.1:5000/",
        "https://wandb.ai/team/own/r/call/b7ad6b7169203331",
    ]

    browser.settled(lambda: browser.press("ArrowRight"))
    assert "took 30 s" in browser.text()
    browser.settled(lambda: browser.press("ArrowLeft"))
    browser.settled(lambda: browser.click(".title a[title='key t']"))
    browser.wait("!!document.querySelector('.tokens .token')")
    browser.evaluate("document.querySelector('.tokens .token:nth-child(3)').focus()")
    browser.press("ArrowRight")
    assert "-0.25 nats" in browser.evaluate("document.querySelector('.token-details').innerText")
    browser.settled(lambda: browser.click("#tools a[href*='search']"))
    browser.write("input[name=text]", "#### 42")
    browser.settled(lambda: browser.press("Enter"))
    assert browser.wait("document.querySelectorAll('table.hits tbody tr').length") == 2

    browser.settled(lambda: browser.click("table.hits a.open"))
    browser.settled(lambda: browser.click("a.button[href*='compare']"))
    assert browser.evaluate("[...document.querySelectorAll('.compare mark')].map((node) => node.innerText)") == ["13"]
    browser.settled(lambda: browser.click(".compare a.strong"))
    browser.settled(lambda: browser.click("a.button[href*='prompt']"))
    assert browser.evaluate("document.querySelectorAll('.by-step-row').length") == 2
    browser.settled(lambda: browser.click("#tools a[href*='failures']"))
    assert 'the tool "calculator" took 30 s' in browser.text()
    browser.settled(lambda: browser.click("td a[href*='search']"))
    browser.wait("document.querySelectorAll('table.hits tbody tr').length === 2")

    assert browser.problems == []
    assert [address for address in browser.requests if not address.startswith((url, "data:"))] == []  # data: Chromium's


def test_a_prompt_marks_the_answers_that_the_step_before_did_not_give(
    browser: Browser, url: str, outputs: Path
) -> None:
    rollouts = [rollout("tidy", 4, 7, n) for n in (0, 1)]
    rollouts[0].turns[1].messages[0].content = "#### 21"
    write_trajectories(outputs / "tidy/trajectories/step_4.parquet", rollouts)

    browser.open(f"{url}#/prompt?run=tidy&sample=7")

    marked = "[...document.querySelectorAll('.by-step-row')].map((row) => row.querySelector('mark')?.innerText ?? '')"
    assert browser.evaluate(marked) == ["", "", "#### 21"]
    assert browser.problems == []


def test_no_number_counts_the_greedy_baselines_of_remax(browser: Browser, url: str, outputs: Path) -> None:
    write_remax_step(RunFolder(outputs / "tidy"), 4)

    browser.open(f"{url}#/step?run=tidy&step=4&since=2")

    assert browser.evaluate("document.querySelector('.title .score').innerText") == "reward 0.333"
    rows = browser.evaluate("[...document.querySelectorAll('.numbers > div')].map((row) => row.innerText)")
    assert rows[:4] == [
        "rollouts\n4",
        "greedy baselines, in no mean\n2",
        "prompts\n2",
        "without variance\n1 of 2",
    ]
    bars = browser.evaluate("[...document.querySelectorAll('.histogram button')].map((bar) => bar.ariaLabel)")
    assert bars == ["2 rollouts with a reward from 0 to 0", "1 rollouts with a reward from 1 to 1"]
    assert browser.evaluate("document.querySelectorAll('.cell.baseline').length") == 2
    changes = browser.evaluate("[...document.querySelectorAll('.group-foot')].map((foot) => foot.innerText)")
    assert changes == ["0.5 → 0.5, as before\n± 0.5", "0 → 0, as before\nno variance"]
    browser.open(f"{url}#/prompt?run=tidy&sample=10")
    mean = browser.evaluate("document.querySelector('.chart').ariaLabel")
    assert mean == "mean reward: steps 1 to 4, newest 0" and browser.problems == []


def test_a_token_is_opened_by_its_place_in_a_long_response_and_by_its_rank(
    browser: Browser, url: str, outputs: Path
) -> None:
    long = rollout("tidy", 4, 7, 0)
    long.response_ids, long.response_mask = list(range(3000)), [1] * 3000
    long.response_logprobs = [-8.0 if place == 10 else -0.5 for place in range(3000)]
    write_trajectories(outputs / "tidy/trajectories/step_4.parquet", [long])
    focused = "[document.activeElement.dataset.index, document.activeElement.innerText].join()"

    browser.open(f"{url}#/tokens?run=tidy&step=4&sample=7&rollout=0&place=2500")
    assert browser.evaluate(focused) == "454,2500"  # 2 of the prompt and 2,500 before it, 2,048 on the first page
    assert "2,502 of 3,002, response" in browser.evaluate("document.querySelector('.token-details').innerText")
    browser.settled(lambda: browser.click(".least li:first-child a"))

    assert browser.evaluate(focused) == "12,10" and browser.problems == []


@contextmanager
def holding(browser: Browser, requests: str) -> Iterator[None]:
    """Requests whose address fits this pattern are sent only when the block ends."""
    browser.call("Fetch.enable", patterns=[{"urlPattern": requests}])
    try:
        yield
    finally:
        browser.call("Fetch.disable")


def test_the_page_shows_that_it_waits_for_a_reply(browser: Browser, url: str) -> None:
    browser.open(f"{url}#/run?run=tidy")
    assert browser.evaluate("document.getElementById('progress').hidden")

    with holding(browser, "*/api/step?*"):
        browser.click(".steps a[aria-label^='step 2']")
        browser.wait("!document.getElementById('progress').hidden")
        assert browser.text().startswith("tidy")  # what was there stays until the reply comes
    browser.settled(lambda: None)

    assert browser.text().startswith("Step 2") and browser.evaluate("document.getElementById('progress').hidden")


def test_a_live_run_is_followed_in_the_open_page(browser: Browser, url: str, outputs: Path) -> None:
    folder = RunFolder(outputs / "tidy")
    state = folder.path / "state.json"
    state.write_text(state.read_text().replace('"finished"', '"running"'))
    browser.open(f"{url}#/run?run=tidy")
    browser.evaluate("window.isTheSamePage = true")
    browser.write("#metric", "actor/entr")

    write_step(folder, 4)
    new = {"fully_async/trainer/idle_ratio": 0.25, "training/off_policy/trajectory_staleness/mean": 1.5}
    folder.append_row(MetricsRow(step=5, timestamp=1005, data=new))
    wait = Wait(who="the learner", waits_for="rollouts of step 6", since=1000, progress="7 of 8")
    folder.write_activity(Activity(waits=[wait]))
    browser.wait("document.getElementById('main').innerText.includes('rollouts of step 6')")

    assert browser.evaluate("document.querySelector('.steps a:last-child').ariaLabel") == "step 4, mean reward 0.25"
    charts = browser.evaluate("[...document.querySelectorAll('.chart')].map((chart) => chart.ariaLabel)")
    assert charts[1:3] == ["gen, other of each step", "idle share: steps 5 to 5, newest 0.25"]
    assert "staleness\n1.5" in browser.text()
    assert browser.evaluate("[isTheSamePage, document.activeElement.id, document.activeElement.value]") == [
        True,
        "metric",
        "actor/entr",
    ]
    assert browser.problems == []


def test_a_phase_has_one_colour_in_every_run_and_on_every_page(browser: Browser, url: str, outputs: Path) -> None:
    for name, phases in (("few", ["gen", "update_actor"]), ("many", ["gen", "testing", "update_actor"])):
        data = {"timing_s/step": 4.0} | {f"timing_s/{phase}": 1.0 for phase in phases}
        write_run(outputs, name, steps=0).append_row(MetricsRow(step=1, timestamp=1001, data=data))
    swatch = (
        "Object.fromEntries([...document.querySelectorAll('.legend li')].map((item) => "
        "[item.innerText, getComputedStyle(item.firstChild).backgroundColor]))"
    )
    few, many = (browser.open(f"{url}#/run?run={name}") or browser.evaluate(swatch) for name in ("few", "many"))
    browser.open(f"{url}#/trajectory?run=tidy&step=2&sample=7&rollout=1")
    lane = browser.evaluate("getComputedStyle(document.querySelector('.lane i.model')).backgroundColor")

    assert few["update_actor"] == many["update_actor"] and few["gen"] == many["gen"] == lane
    phases = ("gen", "testing", "update_actor", "other")
    assert len({many[name] for name in phases}) == 4


def test_the_list_draws_the_chosen_runs_over_each_other(browser: Browser, url: str, outputs: Path) -> None:
    write_run(outputs, "other")
    lines = "document.querySelectorAll('main .panel:first-child path.line').length"

    browser.open(f"{url}#/")
    browser.wait(f"{lines} === 2")
    browser.click("input[value=other]")
    browser.wait(f"{lines} === 1")

    assert browser.evaluate("location.hash") == "#/runs?compare=tidy"
    assert browser.evaluate("document.querySelector('main .legend').innerText") == "tidy"


def test_what_differs_between_configurations_is_shown_side_by_side(browser: Browser, url: str, outputs: Path) -> None:
    for name, lr in (("other", 0.002), ("third", 0.003)):
        file = write_run(outputs, name).path / "config.json"
        config = json.loads(file.read_text())
        config["actor_rollout_ref"]["actor"]["optim"]["lr"] = lr
        config["trainer"]["experiment_name"] = "tidy"
        config["data"]["train_files"] = [HOSTILE]
        file.write_text(json.dumps(config))
    rows = "[...document.querySelectorAll('.config tbody tr:not([hidden])')].map((row) => row.innerText.split(/\\s+/))"

    browser.open(f"{url}#/run?run=tidy")
    browser.settled(lambda: browser.click(".title a[href*=config]"))
    assert len(browser.evaluate(rows)) > 100
    browser.write("input[type=search]", "actor.optim.LR_W")
    assert [row[0].rpartition(".")[2] for row in browser.evaluate(rows)] == ["lr_warmup_steps", "lr_warmup_steps_ratio"]

    browser.open(f"{url}#/config?run=other")
    for name in ("third", "tidy"):
        browser.write("#other", name)
        browser.settled(lambda: browser.press("Enter"))
    browser.wait("location.hash === '#/config?run=other&with=third%2Ctidy'")
    browser.settled(lambda: None)
    lr = "actor_rollout_ref.actor.optim.lr"
    assert ["data.train_files", lr] == [row[0] for row in browser.evaluate(rows)]
    assert browser.evaluate(rows)[1] == [lr, "0.002", "0.003", "0.000001"]
    assert browser.evaluate("[...document.querySelectorAll('td')].map((td) => td.className).join()") == (
        ",,differs,,differs,differs"
    )
    assert browser.evaluate("document.querySelectorAll('main img, main script').length") == 0
    browser.settled(lambda: browser.click("thead a[aria-label='leave out tidy']"))
    assert [row[0] for row in browser.evaluate(rows)] == [lr] and browser.problems == []


def test_a_search_is_saved_in_the_browser_and_asked_again(browser: Browser, url: str) -> None:
    browser.open(f"{url}#/search?run=tidy&text=42&tool=calculator&first_step=2&last_step=2&least=1")
    browser.click("button[title^='kept in this browser']")
    browser.open(f"{url}#/search?run=tidy")

    browser.settled(lambda: browser.click(".queries .chip a"))
    browser.wait("document.querySelectorAll('table.hits tbody tr').length === 1")
    browser.click(".queries .chip button")

    assert browser.evaluate("document.querySelectorAll('.queries .chip').length") == 0


def test_a_search_by_a_span_finds_the_trajectories_of_its_traces(
    browser: Browser, url: str, outputs: Path, mlflow: str
) -> None:
    RunFolder(outputs / "tidy").update(mlflow_uri=mlflow)
    browser.open(f"{url}#/search?run=tidy")
    browser.evaluate("document.querySelector('form.search [name=span]').value = 'execute_tool *'")
    browser.click("form.search button.primary")

    browser.wait("document.querySelectorAll('table.hits tbody tr').length === 2")
    assert browser.evaluate("document.querySelector('form.search [name=span]').value") == "execute_tool *"
    assert browser.problems == []


def test_a_search_can_be_cancelled(browser: Browser, url: str) -> None:
    with holding(browser, "*/api/search?*"):
        browser.open(f"{url}#/search?run=tidy&text=42")
        browser.evaluate(
            "[...document.querySelectorAll('#main button')].find((node) => node.innerText === 'Cancel').id = 'stop'"
        )
        browser.click("#stop")
        # At once, and not when the reply comes.
        browser.wait("document.querySelector('#main [role=status]').innerText.includes('cancelled')")
        assert browser.evaluate("!document.getElementById('stop') || document.getElementById('stop').hidden")
    assert browser.problems == []


CANCEL_AT_ONCE = """new MutationObserver((_, observer) => {
  const cancel = [...document.querySelectorAll('#main button')].find((node) => node.innerText === 'Cancel');
  if (cancel) { observer.disconnect(); cancel.click(); }
}).observe(document.getElementById('main'), {childList: true, subtree: true})"""


def test_failures_are_shown_as_files_are_read_and_reading_can_be_cancelled(
    browser: Browser, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(over_steps, "BUDGET_S", 0.0)
    monkeypatch.setattr(over_steps, "TOGETHER", 1)
    browser.open(f"{url}#/run?run=tidy")
    browser.evaluate(f"void {CANCEL_AT_ONCE}")

    browser.settled(lambda: browser.click("#tools a[href*='failures']"))
    # The newest file, and the one that had been asked for when it was cancelled.
    wanted = "2 of 4 files read, the newest first, cancelled"
    browser.wait(f"document.querySelector('#main [role=status]').innerText === '{wanted}'")
    browser.click("#main .row button")
    browser.wait("!document.querySelector('#main [role=status]')")

    browser.settled(lambda: browser.click(".segments a[href*='own']"))
    assert "Failed tool calls, which the model saw" in browser.text()
    counts = "document.querySelector('.title .dim').innerText"
    assert browser.evaluate(counts) == "2 rollouts ended by an error, 2 failed tool calls, 0 problems recovered from"
    browser.open(f"{url}#/failures?run=tidy&service=rollout")
    assert browser.evaluate(counts) == "0 rollouts ended by an error, 0 failed tool calls, 0 problems recovered from"
    assert "None of the failures is of this kind." in browser.text()
    browser.open(f"{url}#/failures?run=tidy&only=infrastructure&service=tools")
    assert browser.evaluate("[...document.querySelectorAll('.causes td b')].map((b) => b.innerText)") == ["retried"]
    assert browser.evaluate("document.querySelector('select').value") == "tools"
    assert browser.problems == []


def test_no_text_of_a_run_becomes_a_part_of_the_page(browser: Browser, url: str) -> None:
    for view in ("", "run?run=tidy", "step?run=tidy&step=3", "trajectory?run=tidy&step=3&sample=1&rollout=0"):
        browser.open(f"{url}#/{view}")
        assert HOSTILE in browser.text()
        assert browser.evaluate("document.querySelectorAll('main img, main script').length") == 0
    browser.open(f"{url}#/search?run=tidy&text=%3Cscript%3E")
    browser.wait("document.querySelectorAll('table.hits tbody tr').length")
    assert "taken" not in browser.evaluate("document.title") and browser.problems == []


@pytest.mark.parametrize("width", [1280, 390])
def test_each_page_fits_a_screen_and_a_phone_in_both_colour_schemes(
    browser: Browser, url: str, outputs: Path, width: int
) -> None:
    for name in ("eval-a", "eval-b"):
        write_evaluation(outputs / name, {1: [1.0, 0.0], 2: [0.0, None]})
    place = "run=tidy&step=2&sample=7&rollout=1"
    tables = {"": 3, "failures?run=tidy": 3, "search?run=tidy&text=42": 11, "evaluations?run=eval-a": 2}
    for dark, background in ((False, "rgb(245, 246, 244)"), (True, "rgb(16, 19, 22)")):
        browser.size(width, dark=dark)
        for view in (
            "",
            "run?run=tidy",
            "step?run=tidy&step=2",
            f"trajectory?{place}",
            f"tokens?{place}",
            "search?run=tidy&text=42",
            "prompt?run=tidy&sample=7",
            "failures?run=tidy",
            "run?run=eval-a",
            "evaluations?run=eval-a",
            "config?run=tidy",
            "config?run=tidy&with=eval-a",
            "runs?compare=tidy,eval-a&metrics=timing_s/gen",
            "compare?run=tidy&of=2/7/1,v0/1/0/eval-a",
            "compare?run=tidy&of=1/7/0,2/7/1,2/10/0",
            f"tokens?{place}&tint=advantage",
            f"tokens?{place}&tint=clip",
            "system",
            "try",
        ):
            browser.open(f"{url}#/{view}")
            assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth"), view
            assert browser.evaluate("getComputedStyle(document.body).backgroundColor") == background
            assert accessibility.faults(browser) == [], view
            if view in tables:  # whose rows can be seen without scrolling to the side
                browser.wait(f"document.querySelectorAll('.panel.scroll tbody tr').length === {tables[view]}")
                panels = "[...document.querySelectorAll('.panel.scroll')]"
                assert browser.evaluate(f"{panels}.every((panel) => panel.scrollWidth <= panel.clientWidth)"), view


def test_what_is_missing_says_what_to_do(browser: Browser, url: str, outputs: Path) -> None:
    browser.open(f"{url}#/step?run=tidy&step=9")
    assert "expected a step of run tidy (1 to 3), got 9; choose another step" in browser.text()
    browser.open(f"{url}#/step?run=tidy&step=2")
    browser.write("input[type=number]", "7")
    browser.press("Enter")
    refused = "There are no trajectories of step 7 to compare with; choose from 1 to 3."
    assert browser.evaluate("document.querySelector('input[type=number]').validationMessage") == refused
    assert browser.evaluate("location.hash") == "#/step?run=tidy&step=2"
    browser.open(f"{url}#/run?run=other")
    links = "[...document.querySelectorAll('.problem a')].map((a) => `${a.innerText} ${a.hash}`)"
    assert browser.evaluate(links) == ["Open the list of runs #/runs"]
    browser.open(f"{url}#/failures?run=other")
    assert browser.evaluate(links) == ["Open the run #/run?run=other", "Open the list of runs #/runs"]
    browser.open(f"{url}#/nonsense")
    assert "There is no view nonsense" in browser.text()
    for view in ("system", "try"):
        browser.open(f"{url}#/{view}")
        assert "expected running services beside this console, got none; start them with" in browser.text()


def test_folders_that_are_dead_empty_broken_or_of_another_kind_say_so(
    browser: Browser, tmp_path: Path, serve: Serve
) -> None:
    for name in ("dead", "broken"):
        write_run(tmp_path / "outputs", name)
    state = tmp_path / "outputs/dead/state.json"
    state.write_text(state.read_text().replace('"finished"', '"running"'))
    (tmp_path / "outputs/dead/worker.json").unlink()
    (tmp_path / "outputs/broken/state.json").write_text("{")
    torn = tmp_path / "outputs/broken/trajectories/step_2.parquet"
    torn.write_bytes(torn.read_bytes()[:2000])
    shutil.rmtree(write_run(tmp_path / "outputs", "bare").path / "trajectories")
    (tmp_path / "photos/holiday").mkdir(parents=True)
    (tmp_path / "photos/holiday/a.parquet").write_bytes(b"not ours")
    url = serve(tmp_path / "outputs")

    browser.open(f"{url}#/")
    assert "running · its process is gone" in browser.text() and "unreadable" in browser.text()
    browser.open(f"{url}#/run?run=dead")
    assert f"trackway train --resume dead --outputs {tmp_path}/outputs" in browser.text()
    assert f"trackway runs logs dead --outputs {tmp_path}/outputs" in browser.text()
    for view in ("failures?run=bare", "search?run=bare&text=a", "run?run=bare"):
        browser.open(f"{url}#/{view}")
        assert "No trajectories are written yet." in browser.text(), view
    browser.open(f"{url}#/run?run=broken")
    assert "cannot be read" in browser.text() and "0.25" in browser.text()  # its metrics are whole
    browser.open(f"{url}#/step?run=broken&step=2")
    assert f"expected trajectories in {torn}, got a file that cannot be read" in browser.text()
    browser.open(f"{url}#/step?run=broken&step=1")
    assert browser.evaluate("document.querySelectorAll('.cell').length") == 4
    for folder in (tmp_path / "none", tmp_path / "photos"):
        browser.open(f"{serve(folder)}#/")
        assert f"There is no run in {folder}." in browser.text()
        assert "trackway demo" in browser.text()


def test_a_chart_rows_and_a_trajectory_can_be_saved(browser: Browser, url: str, outputs: Path, tmp_path: Path) -> None:
    browser.call("Page.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))

    def saved(name: str, selector: str) -> Path:
        browser.click(selector)
        browser.until(lambda: (tmp_path / name).is_file())
        return tmp_path / name

    browser.open(f"{url}#/run?run=tidy")
    picture = saved("reward-accuracy.png", ".chart-box button").read_bytes()
    assert picture.startswith(b"\x89PNG") and int.from_bytes(picture[16:20]) > 600  # pixels wide
    rows = saved("tidy-metrics.csv", "button[title='save tidy-metrics.csv']").read_text().splitlines()
    assert rows == ["step,actor/entropy,timing_s/step", "1,,2", "2,,2"]
    browser.open(f"{url}#/trajectory?run=tidy&step=2&sample=7&rollout=1")
    line = saved("tidy-2-7-1.jsonl", "button[title='save tidy-2-7-1.jsonl']").read_text()
    written = read_trajectories(outputs / "tidy/trajectories/step_2.parquet")
    assert Trajectory.model_validate_json(line) == written[1]
    browser.open(f"{url}#/step?run=tidy&step=2")
    lines = saved("tidy-step-2.jsonl", "button[title='save tidy-step-2.jsonl']").read_text().splitlines()
    assert [Trajectory.model_validate_json(line) for line in lines] == written
    assert browser.problems == []


@pytest.fixture
def mlflow() -> Iterator[str]:
    """The address of a server that answers as MLflow's does for the trace of the example run."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            spans = [mlflow_span(2, 1, 1.5, 2.0, "failed"), mlflow_span(1, None, 1.0, 3.0)]
            self.answer({"traces": [{"spans": spans}] if self.path.endswith(f"=tr-{TRACE_ID}") else []})

        def do_POST(self) -> None:
            asked = self.rfile.read(int(self.headers["content-length"]))
            is_wanted = b"span.name LIKE 'execute_tool %'" in asked
            self.answer({"traces": [{"trace_id": f"tr-{TRACE_ID}"}] if is_wanted else []})

        def answer(self, reply: dict[str, object]) -> None:
            body = json.dumps(reply).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with answered_by(ThreadingHTTPServer(("127.0.0.1", 0), Answer)) as url:
        yield url


def test_the_times_of_a_trajectory_are_lanes_with_the_spans_of_its_trace_below(
    browser: Browser, url: str, outputs: Path, mlflow: str
) -> None:
    RunFolder(outputs / "tidy").update(mlflow_uri=mlflow)
    browser.open(f"{url}#/trajectory?run=tidy&step=2&sample=7&rollout=1")
    lanes = "[...document.querySelectorAll('.lanes > span, .lanes > b')].map((node) => node.innerText)"
    assert browser.evaluate(lanes) == ["model", "0.75 s", "tools", "0.25 s", "scorer", "0.13 s", "rest", "1.38 s"]
    assert "retried: tools" in browser.text() and "correct\n1" in browser.text()

    browser.click(".spans button")
    browser.wait("document.querySelectorAll('.spans li').length === 2")

    assert browser.evaluate("[...document.querySelectorAll('.spans li')].map((line) => line.innerText)") == [
        "span 1\n2.00 s",
        "span 2\n0.50 s",
    ]
    assert browser.evaluate("document.querySelectorAll('.spans li.bad-text').length") == 1


def test_a_run_of_supervised_training_shows_its_losses_in_place_of_rewards(
    browser: Browser, url: str, outputs: Path
) -> None:
    folder = write_run(outputs, "taught", steps=0)
    for step, losses in enumerate(({"train/loss": 2.0}, {"train/loss": 0.5, "val/loss": 0.75}), start=1):
        data = {**losses, "timing_s/step": 4.0, "perf/total_num_tokens": 10.0}
        folder.append_row(MetricsRow(step=step, timestamp=1000 + step, data=data))

    browser.open(f"{url}#/run?run=taught")

    charts = browser.evaluate("[...document.querySelectorAll('.chart')].map((chart) => chart.ariaLabel)")
    assert charts[0] == "train/loss, val/loss: steps 1 to 2, newest 0.5, 0.75"
    text = browser.text()
    assert "validation loss\n0.75" in text and "loss\n0.5" in text and "mean reward\n" not in text
    assert browser.problems == []
