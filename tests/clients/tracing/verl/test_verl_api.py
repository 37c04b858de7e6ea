"""What verl's tests assert of its rollout trace, asserted of what a real MLflow server stored."""

import asyncio
import random
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from mlflow import MlflowClient
from mlflow.entities import Span, Trace
from pydantic import BaseModel

from trackway.tracing import RolloutTraceConfig, rollout_trace_attr, rollout_trace_op

pytestmark = [pytest.mark.slow, pytest.mark.anyio]


class Tokenizer:
    def decode(self, ids: list[int]) -> str:
        return "decoded:" + ",".join(map(str, ids))


class TokenOutput(BaseModel):
    token_ids: list[int]


class TracedClass:
    tokenizer = Tokenizer()

    @rollout_trace_op
    async def my_method(self, a: object, b: object = 2) -> str:
        return f"result: {a}, {b}"

    @rollout_trace_op
    def my_sync_method(self, a: int, **kwargs: int) -> str:
        return f"sync: {a}"

    @rollout_trace_op
    async def outer(self, who: str) -> str:
        await asyncio.sleep(random.random() / 100)
        return await self.middle(who) + self.inner(who)

    @rollout_trace_op
    async def middle(self, who: str) -> str:
        await asyncio.sleep(random.random() / 100)
        return self.inner(who)

    @rollout_trace_op
    def inner(self, who: str) -> str:
        return who

    @rollout_trace_op
    async def fail(self) -> None:
        raise ValueError("intentional")

    @rollout_trace_op
    async def generate(self, prompt_ids: list[int]) -> TokenOutput:
        return TokenOutput(token_ids=[3, 4])


class ToolAgentLoop:
    """A loop of verl's kind, as its users write them; only the import of the two decorators is ours."""

    tokenizer = Tokenizer()

    @rollout_trace_op
    async def run(self, sampling_params: dict[str, float], **kwargs: object) -> "AgentLoopOutput":
        prompt_ids, response_ids = [1, 2], list[int]()
        for _ in range(2):
            response_ids += await self.generate(prompt_ids + response_ids)
            response_ids += await self._call_tool(len(response_ids))
        return AgentLoopOutput(prompt_ids=prompt_ids, response_ids=response_ids)

    @rollout_trace_op
    async def generate(self, prompt_ids: list[int]) -> list[int]:
        await asyncio.sleep(0)
        return [9]

    async def _call_tool(self, x: int) -> list[int]:
        try:
            text, _, _ = await Calculator().execute("i-1", {"x": x}, agent_data=self)
        except RuntimeError as error:
            text = str(error)
        return [len(text)]


class AgentLoopOutput(BaseModel):
    prompt_ids: list[int]
    response_ids: list[int]
    num_turns: int = 4
    reward_score: float | None = None


class Calculator:
    @rollout_trace_op
    async def execute(self, instance_id: str, parameters: dict[str, int], **kwargs: object) -> tuple[str, float, dict]:
        if parameters["x"] > 1:
            raise RuntimeError("too large")
        return "ok", 0.5, {}


class Store:
    """One MLflow experiment, and what it holds once everything was sent."""

    def __init__(self, uri: str) -> None:
        self.project = f"verl api/ä-{uuid.uuid4().hex[:8]}"
        self._client = MlflowClient(uri)

    def init(self, **options: bool) -> None:
        RolloutTraceConfig.init(self.project, "exp", "mlflow", **options)

    def traces(self, filter_string: str | None = None) -> list[Trace]:
        client = RolloutTraceConfig.get_client()
        assert client is None or client.flush(60)
        experiment = self._client.get_experiment_by_name(self.project)
        if experiment is None:
            return []
        where = [experiment.experiment_id]
        return list(self._client.search_traces(locations=where, filter_string=filter_string, max_results=500))


@pytest.fixture
def store(mlflow_server: str, monkeypatch: pytest.MonkeyPatch, tmp_path) -> Iterator[Store]:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_server)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    yield Store(mlflow_server)
    RolloutTraceConfig.reset()


def tags_of(trace: Trace) -> dict[str, str]:
    return {key: value for key, value in trace.info.tags.items() if not key.startswith("mlflow.")}


def tree_of(trace: Trace) -> list[tuple[str, str | None]]:
    """Each span's name and its parent's, in the order they began."""
    by_id = {span.span_id: span.name for span in trace.data.spans}
    spans = sorted(trace.data.spans, key=lambda span: span.start_time_ns)
    return [(span.name, by_id.get(span.parent_id or "")) for span in spans]


def spans_of(trace: Trace) -> dict[str, Span]:
    return {span.name: span for span in trace.data.spans}


async def test_without_a_backend_methods_work_and_nothing_is_stored(store: Store) -> None:
    RolloutTraceConfig.init(store.project, "exp", None)
    with rollout_trace_attr(step=1):
        assert await TracedClass().my_method(5) == "result: 5, 2"
    assert (RolloutTraceConfig.get_backend(), RolloutTraceConfig.get_client(), store.traces()) == (None, None, [])


async def test_a_call_is_stored_with_its_name_arguments_and_result(store: Store) -> None:
    store.init()
    assert RolloutTraceConfig.get_client() is RolloutTraceConfig.get_instance().client is not None
    assert await TracedClass().my_method("test_a", b="test_b") == "result: test_a, test_b"
    assert TracedClass().my_sync_method(1, c=3) == "sync: 1"
    [plain, synchronous] = sorted(store.traces(), key=lambda trace: trace.data.spans[0].name)
    assert (plain.data.spans[0].name, synchronous.data.spans[0].name) == (
        "TracedClass.my_method",
        "TracedClass.my_sync_method",
    )
    assert plain.data.spans[0].inputs == {"a": "test_a", "b": "test_b"}
    assert plain.data.spans[0].outputs == "result: test_a, test_b"
    assert synchronous.data.spans[0].inputs == {"a": 1, "kwargs": {"c": 3}}


async def test_token2text_adds_prompt_and_response_and_leaves_the_result_alone(store: Store) -> None:
    store.init(token2text=True)
    output = await TracedClass().generate(prompt_ids=[1, 2])
    assert output == TokenOutput(token_ids=[3, 4])
    [trace] = store.traces()
    assert trace.data.spans[0].inputs == {"prompt_ids": [1, 2]}
    texts = {"prompt_text": "decoded:1,2", "response_text": "decoded:3,4"}
    assert trace.data.spans[0].outputs == {"token_ids": [3, 4], **texts}


async def test_without_token2text_no_text_is_stored(store: Store) -> None:
    store.init()
    await TracedClass().generate(prompt_ids=[1, 2])
    [trace] = store.traces()
    assert trace.data.spans[0].outputs == {"token_ids": [3, 4]}


async def test_an_exception_is_stored_and_propagates(store: Store) -> None:
    store.init()
    with pytest.raises(ValueError, match="intentional"), rollout_trace_attr(step=1):
        await TracedClass().fail()
    [trace] = store.traces()
    assert trace.info.state == "ERROR"
    failed = spans_of(trace)["TracedClass.fail"]
    assert (failed.status.status_code, failed.status.description) == ("ERROR", "intentional")
    assert [event.name for event in failed.events] == ["exception"]


async def test_trace_false_stores_nothing_inside_nested_or_after_an_exception(store: Store) -> None:
    store.init()
    with rollout_trace_attr(step=1, trace=False):
        await TracedClass().outer("silent")
        with rollout_trace_attr(step=1, sample_index=1):
            await TracedClass().outer("silent too")
    with pytest.raises(ValueError, match="intentional"), rollout_trace_attr(step=2, trace=False):
        await TracedClass().fail()
    with rollout_trace_attr(step=3):
        await TracedClass().my_method(1)
    [trace] = store.traces()
    assert trace.info.tags["step"] == "3"
    assert tree_of(trace) == [("rollout_trace", None), ("TracedClass.my_method", "rollout_trace")]


async def test_the_tags_are_those_given_plus_validate_and_experiment_name(store: Store) -> None:
    store.init()
    with rollout_trace_attr(name="bare"):
        pass
    with rollout_trace_attr(sample_index=0, step=1, rollout_n=2, name="whole", validate=True):
        pass
    found = {trace.info.tags["mlflow.traceName"]: tags_of(trace) for trace in store.traces()}
    always = {"experiment_name": "exp", "service.name": "trackway"}
    assert found["bare"] == {**always, "validate": "False"}
    assert found["whole"] == {**always, "validate": "True", "sample_index": "0", "step": "1", "rollout_n": "2"}


async def test_traces_are_found_by_their_tags(store: Store) -> None:
    store.init()
    for step in (1, 2):
        with rollout_trace_attr(sample_index=7, step=step, rollout_n=0):
            pass
    assert [trace.info.tags["step"] for trace in store.traces("tags.step = '2' AND tags.sample_index = '7'")] == ["2"]


async def test_concurrent_trajectories_in_tasks_and_threads_never_mix(store: Store) -> None:
    """Each tree holds its own four calls, in shape, and no other's."""
    store.init()

    async def trajectory(index: int) -> None:
        with rollout_trace_attr(sample_index=index, step=1, rollout_n=index % 4, name="agent_loop"):
            await TracedClass().outer(f"t{index}")

    with ThreadPoolExecutor(8) as threads:
        in_threads = [threads.submit(asyncio.run, trajectory(index)) for index in range(120, 200)]
        await asyncio.gather(*(trajectory(index) for index in range(120)))
        assert all(future.result() is None for future in in_threads)
    traces = {trace.info.tags["sample_index"]: trace for trace in store.traces()}
    assert traces.keys() == {str(index) for index in range(200)}
    for index, trace in traces.items():
        assert trace.info.tags["rollout_n"] == str(int(index) % 4)
        calls = [span for span in trace.data.spans if span.parent_id is not None]
        assert {call.inputs["who"] for call in calls} == {f"t{index}"}
        outer, middle, inner = (f"TracedClass.{name}" for name in ("outer", "middle", "inner"))
        assert sorted(tree_of(trace)) == sorted(
            [("agent_loop", None), (outer, "agent_loop"), (middle, outer), (inner, middle), (inner, outer)]
        )


async def test_a_loop_of_verls_kind_gives_its_whole_tree_and_shows_it_on_the_root(store: Store) -> None:
    store.init(token2text=True)
    with rollout_trace_attr(step=3, sample_index=1, rollout_n=0, validate=False, name="agent_loop"):
        await ToolAgentLoop().run({"temperature": 1.0}, index=1)
    [trace] = store.traces()
    turn = [("ToolAgentLoop.generate", "ToolAgentLoop.run"), ("Calculator.execute", "ToolAgentLoop.run")]
    assert tree_of(trace) == [("agent_loop", None), ("ToolAgentLoop.run", "agent_loop"), *turn, *turn]
    root = spans_of(trace)["agent_loop"]
    assert root.inputs == {"sampling_params": {"temperature": 1.0}, "kwargs": {"index": 1}}
    texts = {"prompt_text": "decoded:1,2", "response_text": "decoded:9,2,9,9"}
    numbers = {"prompt_ids": [1, 2], "response_ids": [9, 2, 9, 9], "num_turns": 4, "reward_score": None}
    assert root.outputs == {**texts, **numbers}
    tools = [span for span in trace.data.spans if span.name == "Calculator.execute"]
    assert [span.status.status_code == "ERROR" for span in tools] == [False, True]
    assert (trace.info.state, trace.info.trace_metadata["mlflow.trace.session"]) == ("OK", "exp/3/1")
