"""`trackway traces` against a real MLflow server, with spans as the services export them."""

import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from textwrap import dedent

import pytest
from mlflow import MlflowClient
from typer.testing import CliRunner

import trackway.traces as traces
from tests.traces.exported import EXPERIMENT, ExportedTraces, Services, tags
from tests.traces.framework_spans import GEN_AI_TOOL, OPENINFERENCE
from trackway.deploy.commands.traces import app
from trackway.deploy.runs import demo
from trackway.system.process import UserError
from trackway.traces import rules
from trackway.traces.store import TraceFilter
from trackway.tracing.local_mlflow import client as local_mlflow

pytestmark = pytest.mark.slow


def trackway(exported: ExportedTraces, *words: str, status: int = 0) -> str:
    """What `trackway traces` prints."""
    where = ["--outputs", str(exported.outputs), "--mlflow-uri", exported.uri, "--project", EXPERIMENT]
    done = CliRunner().invoke(app, [*words, *where])
    assert done.exit_code == status, (done.output, done.exception)
    return done.stdout


def listed(exported: ExportedTraces, *words: str) -> list[str]:
    """Ids of the traces that a list has, in its order."""
    return [row["trace_id"] for row in json.loads(trackway(exported, "list", *words, "--json"))]


@pytest.fixture(scope="module")
def exported(mlflow_server: str, tmp_path_factory: pytest.TempPathFactory) -> ExportedTraces:
    """One run whose traces are whole, one whose traces have gaps."""
    exported = ExportedTraces(mlflow_server, tmp_path_factory.mktemp("outputs"))
    services = Services(mlflow_server, exported.experiment_id)
    exported.add("s1n0", services.trajectory(tags(1)))
    exported.add("s1n1", services.trajectory(tags(1, rollout_n=1), reward=0.0))
    exported.add("s2n0", services.trajectory(tags(2, sample_index=8), reward=0.5, stumbles=True))
    for attributes in (OPENINFERENCE, GEN_AI_TOOL):
        services.framework(exported.made["s2n0"], attributes)
    exported.add("s10n0", services.trajectory(tags(10), reward=-1.0, fail=True))
    exported.add("val", services.trajectory(tags(2, validate=True)))
    exported.add("rootless", services.trajectory(tags(3, run="gaps"), loses="agent"))
    exported.add("chatless", services.trajectory(tags(3, rollout_n=1, run="gaps"), loses="rollout"))
    exported.add("mistagged", services.trajectory(tags(3, rollout_n=2, run="gaps")))
    exported.made["mistagged"].tags.step = 4
    exported.add("absent", exported.made["s1n0"].model_copy(update={"trace_id": "f" * 32, "tags": tags(3, run="gaps")}))
    services.train_step(1, [(exported.made["s1n0"].trace_id or "", "ab" * 8)])
    for service in services.all.values():
        assert service.shutdown(30)
    exported.wait_for_roots(7)
    exported.say("s1n0", "reward", 0.25)
    exported.say("s1n0", "reward", 0.75)  # the newest counts
    exported.say("s1n1", "fate", "used")
    exported.dump("whole", 1, "s1n1", untraced=2)
    exported.dump("whole", 2, "s2n0")
    exported.dump("whole", 10, "s10n0")
    exported.dump("gaps", 3, "rootless", "chatless", "mistagged", "absent")
    return exported


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ([], ["s1n0", "s1n1", "s2n0", "s10n0", "val", "chatless", "mistagged"]),
        (["--step", "1"], ["s1n0", "s1n1"]),
        (["--step", "1-2", "--train"], ["s1n0", "s1n1", "s2n0"]),
        (["--step", "3-"], ["s10n0", "chatless", "mistagged"]),
        (["--step", "3-", "--experiment-name", "whole"], ["s10n0"]),
        (["--step", "2-200", "--validate"], ["val"]),
        (["--sample-index", "8"], ["s2n0"]),
        (["--rollout-n", "1"], ["s1n1", "chatless"]),
        (["--outcome", "tool_failed"], ["s2n0"]),
        (["--outcome", "error:*"], ["s10n0"]),
        (["--tag", "incidents=*failed*"], ["s2n0"]),
        (["--tag", "rollout_n=1", "--tag", "experiment_name=gaps"], ["chatless"]),
        (["--reward-max", "0.5", "--experiment-name", "whole"], ["s1n1", "s2n0", "s10n0"]),
        (["--reward-min", "0.6", "--reward-max", "0.9"], ["s1n0"]),
        (["--step", "99"], []),
    ],
    ids=lambda value: " ".join(value),
)
def test_a_list_has_exactly_the_trajectories_that_match(
    exported: ExportedTraces, words: list[str], names: list[str]
) -> None:
    assert set(listed(exported, *words)) == exported.ids(*names)


def test_an_experiment_without_traces_is_named_with_those_that_have_some(exported: ExportedTraces) -> None:
    where = ["--outputs", str(exported.outputs), "--mlflow-uri", exported.uri, "--project", EXPERIMENT]

    with pytest.raises(UserError, match=r"expected a run with traces \(the newest are of gaps, whole\), got 'nope'"):
        CliRunner().invoke(app, ["list", "--experiment-name", "nope", *where], catch_exceptions=False)
    with pytest.raises(UserError, match="no trace of --run gaps matches the other options"):
        CliRunner().invoke(app, ["list", "--experiment-name", "gaps", "--step", "9", *where], catch_exceptions=False)
    with pytest.raises(UserError, match="expected a step of gaps, got traces of the kind trajectory alone; add --kind"):
        CliRunner().invoke(app, ["list", "--experiment-name", "gaps", "--kind", "step", *where], catch_exceptions=False)


def test_steps_of_the_trainer_are_listed_apart(exported: ExportedTraces) -> None:
    [row] = json.loads(trackway(exported, "list", "--kind", "step", "--json"))
    assert (row["name"], row["tags"]["train_step"], row["turns"]) == ("train step 1", "1", 0)
    assert listed(exported, "--kind", "step", "--step", "2") == []
    [tree] = traces.MlflowStore.open(exported.uri, EXPERIMENT).search(TraceFilter(traces.TraceKind.STEP))
    [update] = tree.of_kind("optimizer_step")
    assert [link.trace_id for link in update.links] == [exported.made["s1n0"].trace_id]


def test_a_list_has_the_newest_first_and_is_cut(exported: ExportedTraces, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    shown = trackway(exported, "list", "--step", "1", "--run", "whole", "--limit", "1")
    [header, first, count] = [line.split() for line in shown.splitlines()]
    assert header[:4] == ["name", "trace", "step", "sample"]
    assert first == [
        *["s1/i7/n1", f"tr-{exported.made['s1n1'].trace_id}", "1", "7", "1", "ok", "0", "2", "30+20"],
        *[first[9], "so", "[the", "answer]", "is⏎####", "54"],
    ]
    assert " ".join(count) == "1 traces (more exist: raise --limit)"


def test_a_trace_is_shown_by_its_name_its_id_and_the_beginning_of_its_id(exported: ExportedTraces) -> None:
    trace_id = exported.made["s1n1"].trace_id or ""
    by_name = trackway(exported, "show", "s1/i7/n1")
    assert by_name == trackway(exported, "show", f"tr-{trace_id}") == trackway(exported, "show", trace_id[:12])
    for line in (
        "reward       0",
        "fate         used",
        "weights      1",
        "event  retried",
        "#### 54",
        "so [the answer] is",
    ):
        assert line in by_name
    assert '{"name": "calculator", "arguments": {"expression": "6*9"}}' in by_name
    plain = json.loads(trackway(exported, "show", "s1/i7/n1", "--json"))
    assert (plain["feedback"], plain["state"], plain["roots"][0]["name"]) == ({"fate": "used"}, "OK", "trajectory")


def test_a_failed_trajectory_is_shown_with_its_error(exported: ExportedTraces) -> None:
    shown = trackway(exported, "show", "s10/i7/n0")
    assert shown.startswith("s10/i7/n0  ERROR") and "error     the engine is gone" in shown


def test_two_steps_of_a_sample_are_compared_on_the_terminal_and_as_a_page(
    exported: ExportedTraces, tmp_path: Path
) -> None:
    words = ["compare", "--sample-index", "7", "--steps", "1,10"]
    lines = [" ".join(line.split()) for line in trackway(exported, *words).splitlines()]
    assert {"≠ reward 0.75 -1", "≠ outcome ok error:engine_failed", "≠ weights 1 10"} <= set(lines)
    assert lines[-1] == "all 2 turns are the same"
    page = tmp_path / "compare.html"
    assert trackway(exported, *words, "--html", str(page)).strip() == str(page)
    assert "#### 54" in page.read_text() and "&lt;tool_call&gt;" in page.read_text()


def test_two_rollouts_of_a_group_are_compared(exported: ExportedTraces) -> None:
    found = json.loads(
        trackway(exported, "compare", "--step", "1", "--sample-index", "7", "--rollouts", "0,1", "--json")
    )
    assert [tree["trace_id"] for tree in found["trees"]] == [
        f"tr-{exported.made[name].trace_id}" for name in ("s1n0", "s1n1")
    ]


def test_a_whole_run_verifies_with_status_0(exported: ExportedTraces, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    found = json.loads(trackway(exported, "verify", "--run", "whole", "--wait", "0", "--json"))
    assert found == {
        "run": "whole",
        "dumps": 3,
        "trajectories": 5,
        "traced": 3,
        "complete": 3,
        "gaps": [],
        "waiting": {"files": 0, "bytes": 0},
    }
    shown = trackway(exported, "verify", "--run", "whole", "--step", "2", "--wait", "0")
    assert shown == "run whole: 1 of 1 traced trajectories have a complete trace (1 trajectories in 1 files)\n"


def test_each_planted_gap_is_found_with_its_reason_and_status_1(exported: ExportedTraces) -> None:
    found = json.loads(trackway(exported, "verify", "--run", "gaps", "--step", "3", "--wait", "0", "--json", status=1))
    reasons = {gap["trace_id"]: gap["reasons"] for gap in found["gaps"]}
    assert (found["traced"], found["complete"]) == (4, 0)
    assert reasons == {
        exported.made["rootless"].trace_id: [
            "the root is missing",
            "turn 0 has lost its parent",
            "turn 1 has lost its parent",
            "reward has lost its parent",
        ],
        exported.made["chatless"].trace_id: ["1 of 2 chat spans: none below turn 0"],
        exported.made["mistagged"].trace_id: ["tag step is '3', expected '4'"],
        "f" * 32: ["the trace is absent"],
    }
    shown = trackway(exported, "verify", "--run", "gaps", "--wait", "0", status=1)
    assert "run gaps: 0 of 4 traced trajectories have a complete trace" in shown and "the trace is absent" in shown


def test_a_reward_that_differs_from_the_dumps_is_a_gap(exported: ExportedTraces) -> None:
    [tree] = traces.MlflowStore.open(exported.uri, EXPERIMENT).get([exported.made["s1n0"].trace_id or ""]).values()
    assert rules.gaps(tree, exported.made["s1n0"]) == ["the reward is 0.75 in the feedback, 1 in the dump"]


def test_the_demo_counts_whole_trees(exported: ExportedTraces, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "TRACES_DEADLINE_S", 0.0)
    made = [exported.made[name] for name in ("s1n1", "s2n0", "chatless")]
    # One process plays all services here, which the demo's five never do.
    assert demo.count_complete(exported.uri, exported.experiment_id, made, demo.gaps_on_one_machine) == 0
    monkeypatch.setattr(rules, "shared_processes", lambda tree: [])
    assert demo.count_complete(exported.uri, exported.experiment_id, made, demo.gaps_on_one_machine) == 2


def test_traces_are_found_by_mlflows_filter_and_checked_by_their_turns(exported: ExportedTraces) -> None:
    store = traces.MlflowStore(exported.uri, [exported.experiment_id])
    [tree] = store.trees("tags.step = '1' AND tags.rollout_n = '1'")
    turns = exported.made["s1n1"].turns
    assert rules.tree_gaps(tree, rules.expected_spans(turns, rewards=1)) == []
    assert rules.tree_gaps(tree, rules.expected_spans(turns[:1], rewards=1))[0] == "2 turn spans, expected 1"


def test_every_trace_is_read_as_mlflows_own_client_reads_it(exported: ExportedTraces) -> None:
    """The trees hold what MLflow's objects hold; the store reads the REST API without that client."""
    theirs = MlflowClient(tracking_uri=exported.uri).search_traces(locations=[exported.experiment_id], max_results=100)
    ours = {tree.trace_id: tree for tree in traces.MlflowStore(exported.uri, [exported.experiment_id]).trees()}
    assert [*ours] == [trace.info.trace_id for trace in theirs] and len(ours) == 9
    for trace in theirs:
        tree = ours[trace.info.trace_id]
        start_ns = min(span.start_time_ns for span in trace.data.spans)
        own_tags = {key: value for key, value in trace.info.tags.items() if not key.startswith(("mlflow.", "service."))}
        assert (tree.state, tree.tags) == (trace.info.state.value, own_tags)
        started = datetime.fromtimestamp(start_ns / 1e9, UTC)
        assert (tree.duration_ms, tree.started) == (trace.info.execution_duration, started)
        spans = {span.span_id: span for span in tree.spans()}
        assert spans.keys() == {span.span_id for span in trace.data.spans}
        for span in trace.data.spans:
            node = spans[span.span_id]
            assert (node.name, node.parent_id, node.status) == (
                span.name,
                span.parent_id,
                span.status.status_code.value,
            )
            assert node.error == (span.status.description or "")
            times = [round((at - start_ns) / 1e6, 3) for at in (span.start_time_ns, span.end_time_ns or 0)]
            assert [node.start_ms, node.end_ms] == times
            rest = {"mlflow.spanInputs", "mlflow.spanOutputs", "mlflow.traceRequestId"}
            values = {key: value for key, value in span.attributes.items() if key not in rest}
            if node.service:
                assert (node.inputs, node.outputs, node.attributes) == (span.inputs, span.outputs, values)
            else:  # a framework's, read by its convention
                assert values.keys() <= node.attributes.keys()
            assert [(event.name, event.attributes) for event in node.events] == [
                (event.name, event.attributes) for event in span.events
            ]
            assert [(f"tr-{link.trace_id}", link.span_id) for link in node.links] == [
                (link.trace_id, link.span_id) for link in span.links
            ]


def test_spans_of_the_agents_framework_are_found_counted_and_drawn(exported: ExportedTraces) -> None:
    assert set(listed(exported, "--span", "Chat*")) == exported.ids("s2n0")
    [row] = json.loads(trackway(exported, "list", "--sample-index", "8", "--json"))
    assert (row["turns"], row["tool_calls"], row["other_tokens"]) == (2, 2, {"prompt": 30, "response": 8})
    drawn = trackway(exported, "show", "s2/i8/n0")
    assert "30 prompt + 8 response tokens" in drawn
    generation = drawn.split("ChatCompletion")[1]
    assert "30 → 8 tokens" in generation and "6*9?" in generation and "calculator({" in generation


def test_a_database_without_a_server_is_read_and_mlflow_is_not_imported(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    local_mlflow.server_uri(uri, deadline_s=240.0)
    services = Services(uri, experiment_id="0")
    made = services.trajectory(tags(1))
    assert all(tracing.shutdown(60) for tracing in services.all.values())
    local_mlflow.stop_shared_server(tmp_path / "mlflow.db")
    assert not local_mlflow.answers(uri)

    command = f"import sys; sys.argv = ['trackway', 'traces', 'list', '--json', '--mlflow-uri', {uri!r}]\n" + dedent("""
        from trackway.deploy.cli import main
        try:
            main()
        finally:
            print(sorted({"mlflow", "weave", "torch"} & sys.modules.keys()), file=sys.stderr)
    """)
    listed = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, timeout=240, check=True)
    local_mlflow.stop_shared_server(tmp_path / "mlflow.db")

    assert [row["trace_id"] for row in json.loads(listed.stdout)] == [f"tr-{made.trace_id}"]
    assert listed.stderr.splitlines()[-1] == "[]"
    assert "starting MLflow for sqlite:///" in listed.stderr


def test_an_answer_that_is_not_mlflows_is_one_line(exported: ExportedTraces) -> None:
    for uri, reason in (
        (f"{exported.uri}/nothing-here", "HTTP 404"),
        ("http://127.0.0.1:9", "Connection refused"),
    ):
        with pytest.raises(UserError, match=f"refused, or did not answer: .*({reason})"):
            traces.experiment_ids(uri, None)
    with pytest.raises(UserError, match="did not answer: Invalid entity type 'tagz'"):
        next(traces.MlflowStore(exported.uri, [exported.experiment_id]).trees("tagz.step = '1'"))
