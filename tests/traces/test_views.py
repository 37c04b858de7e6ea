"""What a tree says about its trajectory, with and without texts."""

from tests.traces.example_trace import ExampleTrace
from trackway.traces import views
from trackway.traces.views import Tokens


def test_the_trainers_feedback_outranks_the_root() -> None:
    assert views.reward_of(ExampleTrace(reward=1.0).tree()) == 1.0
    assert views.reward_of(ExampleTrace(reward=1.0, feedback={"reward": 0.5}).tree()) == 0.5
    assert views.reward_of(ExampleTrace(reward=1.0, feedback={"reward": "bad"}).tree()) == 1.0


def test_a_trace_without_its_root_has_no_reward() -> None:
    example = ExampleTrace()
    example.drop("r")
    assert views.reward_of(example.tree()) is None


def test_tokens_are_the_roots_count() -> None:
    example = ExampleTrace()
    example["r"].outputs = {"prompt_tokens": 30, "response_tokens": 21}
    assert views.tokens_in(example.tree()) == Tokens(prompt=30, response=21)


def test_tokens_that_the_root_did_not_count_come_from_the_first_and_the_last_generation() -> None:
    assert views.tokens_in(ExampleTrace().tree()) == Tokens(prompt=30, response=46 + 4 - 30)


def test_without_generations_there_is_no_count() -> None:
    example = ExampleTrace()
    example.drop("c0", "c1")
    assert (views.tokens_in(example.tree()), views.weight_versions(example.tree())) == (None, "")


def test_the_answer_is_what_the_model_wrote_last() -> None:
    assert views.answer_of(ExampleTrace(answer="#### 7").tree()) == "#### 7"


def test_the_exact_text_of_a_generation_keeps_its_spaces_and_signs() -> None:
    example = ExampleTrace()
    example["c0"].outputs = {"texts": [{"role": "assistant", "content": "\u200b# a  \nb"}]}
    assert views.response_text(example["c0"]) == "\u200b# a  \nb"


def test_without_token2text_there_is_no_text() -> None:
    example = ExampleTrace()
    for span_id in ("c0", "c1"):
        example[span_id].inputs = example[span_id].outputs = None
    assert (views.answer_of(example.tree()), views.has_texts(example.tree())) == ("", False)


def test_weights_are_named_once_and_in_order() -> None:
    example = ExampleTrace()
    example["c0"].attributes["agentic.weight_version"] = "3,4"
    example["c1"].attributes["agentic.weight_version"] = "4"
    assert views.weight_versions(example.tree()) == "3,4"


def test_messages_that_are_none_are_passed_over() -> None:
    example = ExampleTrace()
    example["r"].inputs = {"messages": [{"role": "user", "content": "hi"}, "nonsense"]}
    assert views.message_texts(example.tree()) == [("user", "hi")]


def test_only_finite_numbers_are_numbers() -> None:
    assert [views.number(value) for value in (1, 0.5, "3", True, "x", None, "nan", "inf", [1])] == [
        1.0,
        0.5,
        3.0,
        *[None] * 6,
    ]
