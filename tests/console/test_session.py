"""A run that is driven by calls, such as a session of Tinker's SDK: its steps, its samples and their traces."""

from collections.abc import Sequence
from pathlib import Path

import httpx
import numpy as np
import pytest
from fastapi.testclient import TestClient

from tests.console.browser import Browser
from tests.console.conftest import Serve
from tests.console.example_run import mlflow_span
from trackway.console.app import create_app
from trackway.run_config import compose
from trackway.trainer.calls.losses import TrainedDatum, step_metrics, write_step
from trackway.trainer.calls.protobuf import Datum
from trackway.trainer.run_state.folder import RunFolder
from trackway.trainer.service_urls import ServiceUrls
from trackway.wire.trainer import MetricsRow, RunState

pytestmark = pytest.mark.slow
RUN, MLFLOW = "tinker-1", "http://127.0.0.1:5000"
STEP_TRACE = f"{1:032x}"


def text(ids: Sequence[int]) -> str:
    return " ".join(map(str, ids))


def sampled(prompt: int, answer: int, advantage: float) -> TrainedDatum:
    """The prompt [1, prompt], two tokens of the model, one of a tool, and the answer. Its sample is span `answer`."""
    own = np.array([0, 1, 1, 0, 1])
    tokens = np.array([1, prompt, 5, 6, 7, answer])
    inputs = {"logprobs": -0.5 * own, "advantages": advantage * own}
    datum = Datum(tokens[:-1], tokens[1:], inputs, [f"{RUN}:sample:0:0:{answer}"])
    return TrainedDatum("importance_sampling", datum, -0.75 * np.ones(5), f"00-{STEP_TRACE}-{answer:016x}-01")


DATA = [sampled(2, 3, 0.75), sampled(2, 4, -0.25), sampled(8, 9, 0.0)]


@pytest.fixture
def outputs(tmp_path: Path) -> Path:
    folder = RunFolder(tmp_path / "outputs" / RUN)
    urls = ServiceUrls(agent_url="http://a", tools_url="http://t", weights_url="w")
    folder.create(compose([f"trainer.experiment_name={RUN}"]), urls)
    folder.move(RunState.RUNNING)
    for step in (1, 2):
        write_step(folder.path, step, DATA, text)
        data = {"actor/loss_sum": 3.0 / step, "timing_s/step": 2.0, "timing_s/update_actor": 0.5, **step_metrics(DATA)}
        folder.append_row(MetricsRow(step=step, timestamp=1000 + step, data=data))
    folder.update(step=2, mlflow_uri=MLFLOW, experiment_id="3")
    return tmp_path / "outputs"


def test_the_rollouts_of_a_step_without_rewards_have_their_advantages(outputs: Path) -> None:
    client = TestClient(create_app(outputs))
    page = client.get("/api/step", params={"run": RUN, "step": 2}).json()

    of_advantage = dict(zip(page["advantage"], page["sample_index"], strict=True))
    first, second = of_advantage[0.75], of_advantage[0.0]
    rows = zip(page["sample_index"], page["rollout_n"], page["advantage"], page["traced"], strict=True)
    assert sorted(rows) == sorted([(first, 0, 0.75, True), (first, 1, -0.25, True), (second, 0, 0.0, True)])
    assert page["score"] == [None] * 3 and page["num_turns"] == [4] * 3
    assert page["prompts"] == {first: "1 2", second: "1 8"}
    place = {"run": RUN, "step": 2, "sample": first, "rollout": 1}
    trajectory = client.get("/api/trajectory", params=place).json()
    assert [(member["rollout"], member["advantage"]) for member in trajectory["group"]] == [(0, 0.75), (1, -0.25)]
    assert [[message["content"] for message in turn["messages"]] for turn in trajectory["turns"]] == [
        ["5 6", "7"],
        ["4"],
    ]
    assert (trajectory["trace_id"], trajectory["span_id"]) == (STEP_TRACE, f"{4:016x}")
    assert trajectory["trace"] == f"{MLFLOW}/#/experiments/3/traces?selectedEvaluationId=tr-{STEP_TRACE}"
    tokens = client.get("/api/tokens", params=place).json()
    assert tokens["learner"]["advantages"] == [None, None, -0.25, -0.25, None, -0.25]
    over_steps = client.get("/api/prompt", params={"run": RUN, "sample": first}).json()
    assert [(rollout["step"], rollout["rollout"]) for rollout in over_steps["rollouts"]] == [
        (1, 0),
        (1, 1),
        (2, 0),
        (2, 1),
    ]


@pytest.mark.parametrize(
    ("tag", "shown"),
    [
        ("train_step", [("span 3", 0), ("span 7", 1)]),
        ("step", [("span 1", 0), ("span 3", 1), ("span 4", 1), ("span 7", 2)]),
    ],
)
def test_the_spans_of_a_sample_are_those_of_the_steps_trace_below_its_own(
    outputs: Path, monkeypatch: pytest.MonkeyPatch, tag: str, shown: object
) -> None:
    spans = [
        mlflow_span(1, None, 1.0, 9.0),
        mlflow_span(3, 1, 2.0, 3.0),
        mlflow_span(4, 1, 2.0, 4.0),
        mlflow_span(7, 3, 2.5, 3.0),
    ]
    answer = httpx.Response(200, json={"traces": [{"spans": spans, "trace_info": {"tags": {tag: "2"}}}]})
    monkeypatch.setattr(
        "trackway.console.trajectory.mlflow_http",
        lambda uri, timeout: httpx.Client(transport=httpx.MockTransport(lambda request: answer)),
    )
    client = TestClient(create_app(outputs))

    page = client.get("/api/spans", params={"run": RUN, "trace": STEP_TRACE, "span": f"{3:016x}"}).json()

    assert [(span["name"], span["depth"]) for span in page["spans"]] == shown


@pytest.mark.program("chromium")
def test_clicks_lead_from_a_session_to_the_trace_of_a_sample(browser: Browser, serve: Serve, outputs: Path) -> None:
    url = serve(outputs)
    browser.open(f"{url}#/")
    assert browser.evaluate("document.querySelector('[data-name=step]').innerText") == "2"

    browser.settled(lambda: browser.click("a.open"))
    charts = browser.evaluate("[...document.querySelectorAll('.chart')].map((chart) => chart.ariaLabel)")
    assert charts[0] == "actor/loss_sum: steps 1 to 2, newest 1.5"
    assert "step 2 ·" in browser.text() and "a step takes\n2.00 s" in browser.text()
    assert "reward" not in browser.text()
    browser.settled(lambda: browser.click(".steps a[aria-label^='step 2']"))
    assert browser.evaluate("[...document.querySelectorAll('.cell')].map((cell) => cell.innerText).sort()") == [
        "-.25",
        ".75",
        "0",
    ]
    assert "Advantages\n" in browser.text() and "traced\n3" in browser.text()
    browser.settled(lambda: browser.click(".cell[aria-label*='advantage 0.75']"))
    assert "advantage 0.75" in browser.text()
    assert browser.evaluate("document.querySelector('#turn-2 summary').innerText") == "assistant, turn 2 1 token"
    link = browser.evaluate("document.querySelector('.title a[target]').href")
    assert link == f"{MLFLOW}/#/experiments/3/traces?selectedEvaluationId=tr-{STEP_TRACE}"
    browser.requests.clear()
    browser.click(".spans button")
    query = f"spans?run={RUN}&trace={STEP_TRACE}&span={3:016x}"
    browser.until(lambda: any(address.endswith(query) for address in browser.requests))
    browser.settled(lambda: browser.click(".title a[href*='prompt']"))
    assert "4 rollouts in 2 steps" in browser.text() and "Mean reward" not in browser.text()
    for view in ("", f"run?run={RUN}", f"step?run={RUN}&step=2"):
        browser.size(390)
        browser.open(f"{url}#/{view}")
        assert browser.evaluate("document.documentElement.scrollWidth") == 390, view
