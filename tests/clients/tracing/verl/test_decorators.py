"""verl's decorator around every kind of function and value: it never raises, and never changes a result."""

import asyncio
import contextlib
import inspect
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.time_limits import slowness
from trackway.tracing import SpanHandle, Tracing, TracingSettings, rollout_trace_attr, rollout_trace_op
from trackway.tracing.span_handle import activated
from trackway.tracing.verl import NonRaisingSpan


class Recorder:
    """A tracing as `RolloutTraceConfig` makes it, whose spans can be looked at."""

    def __init__(self, root_operations: bool = True, token2text: bool = True) -> None:
        self.exporter = InMemorySpanExporter()
        settings = TracingSettings(backends=[], mlflow_uri=None, otlp_endpoint=None, token2text=token2text)
        self.tracing = Tracing("agent", settings, self.exporter, root_operations=root_operations)

    def spans(self) -> list[ReadableSpan]:
        assert self.tracing.flush(5)
        return list(self.exporter.get_finished_spans())

    def only(self) -> tuple[object, object]:
        """Inputs and outputs of the only span."""
        [span] = self.spans()
        found = dict(span.attributes or {})
        return tuple(json.loads(str(found.get(f"agentic.{side}", "null"))) for side in ("inputs", "outputs"))


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    recorder = Recorder()
    with activated(recorder.tracing):
        yield recorder
    recorder.tracing.shutdown()


class Kinds:
    @staticmethod
    @rollout_trace_op
    def static_inside(a: int) -> int:
        return a

    @rollout_trace_op
    @staticmethod
    def static_outside(a: int) -> int:
        return a

    @classmethod
    @rollout_trace_op
    def of_class(cls, a: int) -> int:
        return a

    @rollout_trace_op
    @classmethod
    def of_class_outside(cls, a: int) -> int:
        return a


@pytest.mark.parametrize("name", ["static_inside", "static_outside", "of_class", "of_class_outside"])
def test_static_and_class_methods_are_traced_without_their_class(recorder: Recorder, name: str) -> None:
    assert getattr(Kinds, name)(3) == getattr(Kinds(), name)(3) == 3
    assert [json.loads(str((span.attributes or {})["agentic.inputs"])) for span in recorder.spans()] == [{"a": 3}] * 2


def test_generators_pass_untouched() -> None:
    def sync_generator() -> Iterator[int]:
        yield 1

    async def async_generator() -> AsyncIterator[int]:
        yield 1

    assert rollout_trace_op(sync_generator) is sync_generator
    assert rollout_trace_op(async_generator) is async_generator


def test_a_traced_function_keeps_its_name_text_and_signature() -> None:
    @rollout_trace_op
    async def rollout(prompt: str, n: int = 1) -> str:
        """Its text."""
        return prompt

    assert (rollout.__name__, rollout.__doc__) == ("rollout", "Its text.")
    assert list(inspect.signature(rollout).parameters) == ["prompt", "n"]
    assert inspect.iscoroutinefunction(rollout)


def test_a_call_that_does_not_fit_raises_as_it_would_untraced(recorder: Recorder) -> None:
    @rollout_trace_op
    def one(a: int) -> int:
        return a

    with pytest.raises(TypeError, match=r"one\(\) got an unexpected keyword argument 'b'"):
        one(1, b=2)  # pyright: ignore[reportCallIssue]


def test_a_builtin_without_a_signature_is_traced(recorder: Recorder) -> None:
    assert rollout_trace_op(max)(1, 2) == 2
    assert recorder.only() == ({"args": [1, 2], "kwargs": {}}, 2)


@pytest.mark.anyio
async def test_a_cancelled_call_is_marked_and_stays_cancelled(recorder: Recorder) -> None:
    begun = asyncio.Event()

    @rollout_trace_op
    async def wait() -> None:
        begun.set()
        await asyncio.sleep(60)

    task = asyncio.create_task(wait())
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    [span] = recorder.spans()
    assert (span.status.status_code.name, (span.attributes or {})["error.type"]) == ("ERROR", "CancelledError")


class Hostile:
    """Everything that tracing might look at raises."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")

    def __getattr__(self, name: str) -> object:
        raise RuntimeError(f"no {name}")


@dataclass
class Holder:
    """A value that holds itself."""

    items: list[object] = field(default_factory=list)


def circle() -> object:
    holder = Holder()
    holder.items.append(holder)
    return holder


@pytest.mark.parametrize("make", [Hostile, circle, lambda: {Hostile(): 1}, lambda: "\udcff", lambda: 1 << 100_000])
def test_a_value_that_cannot_be_shown_is_handed_through(recorder: Recorder, make: Callable[[], object]) -> None:
    value = make()
    assert rollout_trace_op(lambda given: given)(value) is value
    inputs, outputs = recorder.only()
    assert inputs is not None and outputs is not None


def test_a_huge_value_costs_little_more_than_a_small_one(recorder: Recorder) -> None:
    """Ten million numbers take seconds to write as JSON."""
    echo = rollout_trace_op(lambda given: given)
    echo([1])
    value = [0] * 10_000_000
    started = time.process_time()
    echo(value)
    assert time.process_time() - started < 0.5 * slowness()
    assert json.loads(str((recorder.spans()[1].attributes or {})["agentic.outputs"]))[-1] == "[9999488 more]"


class Loop:
    def __init__(self, decode: Callable[[object], str]) -> None:
        self.tokenizer = type("Tokenizer", (), {"decode": staticmethod(decode)})

    @rollout_trace_op
    async def generate(self, prompt_ids: list[int]) -> dict[str, object]:
        return {"token_ids": [3]}

    @rollout_trace_op
    def answer(self, prompt_ids: list[int]) -> dict[str, object]:
        return {"prompt_ids": None, "response_ids": [4], "token_ids": [3]}


@pytest.mark.anyio
async def test_text_is_decoded_in_another_thread_where_the_loop_runs_in_this_one(recorder: Recorder) -> None:
    threads: list[threading.Thread] = []
    loop = Loop(lambda ids: threads.append(threading.current_thread()) or str(ids))
    assert await loop.generate([1, 2]) == {"token_ids": [3]}
    assert threading.current_thread() not in threads
    texts = {"prompt_text": "[1, 2]", "response_text": "[3]"}
    assert recorder.only() == ({"prompt_ids": [1, 2]}, {"token_ids": [3], **texts})


def test_ids_come_from_the_output_first_and_response_ids_before_token_ids(recorder: Recorder) -> None:
    Loop(str).answer([1, 2])
    _, outputs = recorder.only()
    assert isinstance(outputs, dict)
    assert (outputs["prompt_text"], outputs["response_text"]) == ("[1, 2]", "[4]")


@pytest.mark.anyio
async def test_a_tokenizer_that_raises_leaves_the_result_alone(recorder: Recorder) -> None:
    def decode(ids: object) -> str:
        raise OverflowError(ids)

    assert await Loop(decode).generate([1]) == {"token_ids": [3]}
    _, outputs = recorder.only()
    assert isinstance(outputs, dict) and outputs["response_text"] == "[not decoded: OverflowError]"


@pytest.mark.anyio
async def test_nothing_is_decoded_where_nothing_is_recorded_or_no_text_is_wanted() -> None:
    decoded: list[object] = []
    loop = Loop(lambda ids: decoded.append(ids) or "")
    for recorder, trace in ((Recorder(), False), (Recorder(token2text=False), True)):
        with activated(recorder.tracing), rollout_trace_attr(trace=trace):
            await loop.generate([1])
            loop.answer([1])
        assert len(recorder.spans()) == (3 if trace else 0)
    assert decoded == []


def test_in_a_service_a_call_outside_any_trajectory_is_not_traced() -> None:
    recorder = Recorder(root_operations=False)
    with activated(recorder.tracing):
        assert Kinds.static_inside(1) == 1
    assert recorder.spans() == []


def test_tags_of_numpy_are_numbers(recorder: Recorder) -> None:
    given = {"sample_index": np.int64(4), "step": np.int32(1), "validate": np.bool_(True)}
    with rollout_trace_attr(**given):  # pyright: ignore[reportArgumentType]
        pass
    attributes = recorder.spans()[0].attributes or {}
    assert (attributes["agentic.tag.sample_index"], attributes["agentic.tag.validate"]) == (4, True)
    assert attributes["agentic.group"] == "default/val1/4"


def test_the_root_shows_what_stands_directly_below_it_and_nothing_deeper(recorder: Recorder) -> None:
    inner = rollout_trace_op(lambda given: given)

    @rollout_trace_op
    def outer(question: str) -> str:
        inner("deeper")
        raise KeyError(question)

    with pytest.raises(KeyError), rollout_trace_attr():
        outer("why?")
    attributes = recorder.spans()[-1].attributes or {}
    assert attributes["agentic.inputs"] == '{"question": "why?"}'
    assert "agentic.outputs" not in attributes


@contextlib.contextmanager
def broken_span(at_start: bool) -> Iterator[SpanHandle]:
    if at_start:
        raise OSError("the backend cannot begin")
    with rollout_trace_attr() as span:
        yield span
    raise OSError("the backend cannot end")


@pytest.mark.parametrize("at_start", [True, False])
def test_a_span_that_raises_does_not_reach_the_code_around_it(recorder: Recorder, at_start: bool) -> None:
    with NonRaisingSpan(lambda: broken_span(at_start)) as span:
        span.outputs(1)
    with pytest.raises(KeyError, match="its own"), NonRaisingSpan(lambda: broken_span(at_start)):
        raise KeyError("its own")
