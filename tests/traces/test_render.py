"""What `show` and `compare` print: read as a person reads it, without colours."""

import pytest
from pydantic import JsonValue
from rich.console import Console, RenderableType

from tests.traces.example_trace import ExampleTrace, span
from trackway.traces import render
from trackway.traces.compare import compare
from trackway.traces.render import row
from trackway.traces.tree import SpanEvent, SpanLink
from trackway.traces.verify import Gap, Verification, WaitingSpans


def printed(what: RenderableType, width: int = 120) -> str:
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(what)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def shown(example: ExampleTrace, **style: bool) -> str:
    return printed(render.draw(example.tree(), render.Style(120, **style)))


def test_a_trajectory_is_drawn_as_a_tree_in_time() -> None:
    example = ExampleTrace(feedback={"reward": 1.0, "advantage": 0.5, "fate": "used"})
    assert shown(example).splitlines() == [
        "s3/i17/n2  OK  tr-abababababababababababababababab",
        "tags         experiment_name=tiny  step=3  sample_index=17  rollout_n=2  validate=False  outcome=ok",
        "reward       1",
        "advantage    0.5",
        "fate         used",
        "stop reason  answered",
        "tokens       30 prompt + 20 response",
        "tool calls   1",
        "weights      3",
        "started      2026-11-21 06:00:00.000000 UTC",
        "duration     400 ms",
        "",
        "trajectory                           agent    ━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━   400 ms +0",
        "messages  user: What is 6*9?",
        "├── turn 0                           agent    ━━━━━━━━━━━━━━━━━━━━━━━━                   245 ms +5",
        "│   ├── chat tiny                    rollout   ━━━━━━━━━━                                100 ms +10",
        "│   │   generation  30 → 8 tokens  weights 3",
        "│   │   prompt      the prompt",
        "│   │   wrote       <tool_call>",
        '│   │               {"name": "calculator", "arguments": {"expression": "6*9"}}',
        "│   │               </tool_call>",
        "│   └── execute_tool calculator      tools                   ━                          1.00 ms +150",
        "│       arguments  expression: 6*9",
        "│       result     54",
        "├── turn 1                           agent                             ━━━━━━━━━━━━      119 ms +251",
        "│   └── chat tiny                    rollout                            ━━━━━━━━━━       100 ms +260",
        "│       generation  46 → 4 tokens  weights 3",
        "│       prompt      the prompt",
        "│       wrote       #### 54",
        "└── reward                           reward                                         ━   1.00 ms +380",
        "    inputs   ground_truth: 54",
        "    outputs  score: 1.0",
    ]


@pytest.mark.parametrize(
    "text", ["#### 54", "<tool_call>", "[bold]kept[/bold]", "[/]", "**stars**", "`ticks`", ":smile:"]
)
def test_a_models_text_is_no_markup(text: str) -> None:
    assert f"wrote       {text}" in shown(ExampleTrace(answer=text))
    assert text in printed(render.listing([row(ExampleTrace(answer=text).tree())], 200), 200)


def test_a_text_cannot_act_on_the_terminal() -> None:
    hostile = ExampleTrace(answer="\x1b[2J\x1b]0;title\x07", call="\x1b[31m")
    pictures = [shown(hostile), printed(render.listing([row(hostile.tree())], 200), 200)]
    assert all("\x1b" not in picture and "␛[2J␛]0;title␇" in picture for picture in pictures)


def test_long_texts_are_cut_unless_all_is_asked_for() -> None:
    example = ExampleTrace(answer="\n".join(f"line {index}" for index in range(100)))
    assert "line 11 … 704 more characters" in shown(example) and "line 12" not in shown(example)
    assert "line 99" in shown(example, full=True)


def test_errors_and_events_stand_where_they_happened() -> None:
    example = ExampleTrace(state="ERROR")
    example["x0"].status, example["x0"].error = "ERROR", "out of [memory]"
    stack: dict[str, JsonValue] = {"exception.type": "ValueError", "exception.stacktrace": "Traceback ..."}
    example["t0"].events = [SpanEvent(name="retried", at_ms=100, attributes={"attempt": 2})]
    example["x0"].events = [SpanEvent(name="exception", at_ms=150, attributes=stack)]
    lines = shown(example).splitlines()
    assert lines[0] == "s3/i17/n2  ERROR  tr-abababababababababababababababab"
    assert "│   event  retried +100 ms  attempt=2" in lines
    assert "│       event      exception +150 ms  exception.type=ValueError" in lines
    assert "│       error      out of [memory]" in lines
    assert "Traceback ..." not in shown(example) and "Traceback ..." in shown(example, full=True)


def test_spans_that_lost_their_parent_are_set_apart() -> None:
    example = ExampleTrace(state="IN_PROGRESS")
    example.drop("r")
    assert shown(example).count("these spans have lost their parent:") == 1


def test_an_open_span_is_called_open() -> None:
    example = ExampleTrace()
    example["t1"].end_ms = None
    assert "━━━━━━━━━━━━━━━     open +251" in shown(example)


def test_the_root_shows_its_own_texts_only_when_its_generations_have_none() -> None:
    example = ExampleTrace()
    example["r"].outputs = {"messages": [{"role": "assistant", "content": "it is 54"}]}
    assert "assistant: it is 54" not in shown(example)
    for span_id in ("c0", "c1"):
        example[span_id].outputs = example[span_id].inputs = None
    assert "answer    assistant: it is 54" in shown(example)


def test_a_step_of_the_trainer_shows_what_it_consumed() -> None:
    example = ExampleTrace()
    links = [SpanLink(trace_id="cd" * 16, span_id="1"), SpanLink(trace_id="ef" * 16, span_id="2")]
    example.spans = [
        span("r", None, "train step 3", "trainer", 0, 10),
        span("o", "r", "optimizer_step 0", "trainer", 1, 9, links=links),
    ]
    assert f"links  2 spans of {'cd' * 16}, {'ef' * 16}" in shown(example)


@pytest.mark.parametrize("width", [60, 80, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    example = ExampleTrace(answer="word " * 200)
    lines = printed(render.draw(example.tree(), render.Style(width)), width).splitlines()
    assert max(len(line) for line in lines) <= width


def test_the_facts_of_trajectories_stand_side_by_side() -> None:
    other_example = ExampleTrace(answer="#### 48", reward=0.0, rollout_n=0)
    trees = [ExampleTrace().tree(), other_example.tree(), ExampleTrace(rollout_n=5).tree()]
    lines = [" ".join(line.split()) for line in printed(render.facts(compare(trees)), 140).splitlines()]
    assert lines[0] == "s3/i17/n2 s3/i17/n0 s3/i17/n5"
    assert [line for line in lines if line.startswith("≠")] == ["≠ rollout_n 2 0 5", "≠ reward 1 0 1"]
    assert lines[-4:] == ["", "turn 0: the same", "turn 1: differs", "1 of 2 turns differ"]


def test_a_list_shows_ids_that_show_takes_and_runs_when_there_are_several() -> None:
    other_example = ExampleTrace(rollout_n=0)
    other_example.tags["experiment_name"] = "other"
    [header, first, _] = printed(
        render.listing([row(ExampleTrace().tree()), row(other_example.tree())], 110), 110
    ).splitlines()
    assert " ".join(header.split()) == "name run trace step sample n outcome reward turns tokens ms end of the answer"
    assert first.split() == [
        "s3/i17/n2",
        "tiny",
        "abababababab",
        "3",
        "17",
        "2",
        "ok",
        "1",
        "2",
        "30+20",
        "400",
        "####",
        "54",
    ]
    assert "tr-" + "ab" * 16 in printed(render.listing([row(ExampleTrace().tree())], 130), 130)
    assert " run " not in printed(render.listing([row(ExampleTrace().tree())], 130), 130)


@pytest.mark.parametrize("width", [80, 90, 100])
def test_a_narrow_list_has_names_and_numbers_whole_and_the_answer_gives_way(width: int) -> None:
    long = ExampleTrace(answer="the answer is a long sentence that ends with #### 54")
    [header, line] = printed(render.listing([row(long.tree())], width), width).splitlines()

    numbers = ["s3/i17/n2", "abababababab", "3", "17", "2", "ok", "1", "2", "30+20", "400"]
    assert header.split()[:10] == ["name", "trace", "step", "sample", "n", "outcome", "reward", "turns", "tokens", "ms"]
    assert line.split()[:10] == numbers
    assert ("end of the answer" in header, "#### 54" in line or "…" in line) == (width == 100, width == 100)


def test_a_verification_lists_gaps_and_what_waits_on_disk() -> None:
    gap = Gap(trajectory="tiny/3/17/2", trace_id="ab" * 16, name="s3/i17/n2", reasons=["the trace is absent", "[x]"])
    found = Verification(
        run="tiny", dumps=1, trajectories=8, traced=4, complete=3, gaps=[gap], waiting=WaitingSpans(files=2, bytes=999)
    )
    assert printed(render.verification(found)).splitlines() == [
        "trajectory  trace                             what is wrong",
        f"s3/i17/n2   {'ab' * 16}  the trace is absent",
        "                                              [x]",
        "999 bytes in 2 files wait on disk because the backend was or is down; they are sent once it is back",
        "run tiny: 3 of 4 traced trajectories have a complete trace (8 trajectories in 1 files)",
    ]


def test_of_many_gaps_the_first_are_listed() -> None:
    gaps = [Gap(trajectory="t", trace_id=f"{n:032x}", name=f"s3/i17/n{n}", reasons=["lost"]) for n in range(70)]
    nothing = WaitingSpans(files=0, bytes=0)
    found = Verification(run="tiny", dumps=1, trajectories=70, traced=70, complete=0, gaps=gaps, waiting=nothing)
    lines = printed(render.verification(found)).splitlines()
    assert (len(lines), lines[-2]) == (1 + 50 + 2, "and 20 more, which --json lists")
