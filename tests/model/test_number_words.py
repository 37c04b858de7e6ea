"""The task of examples/smollm2: its rows, reward and configuration."""

import json
from pathlib import Path

import pytest
from make_rows import EXAMPLES, in_words, make_rows

from trackway.reward.functions import RewardFunction, scorer_of_file
from trackway.run_config import compose
from trackway.trainer.data.row_files import read_rows
from trackway.wire.reward import ScoreRequest
from trackway.wire.trajectory import Reward

EXAMPLE = Path(__file__).parents[2] / "examples" / "smollm2"


def test_numbers_in_words() -> None:
    numbers = {
        21: "twenty-one",
        90: "ninety",
        100: "one hundred",
        305: "three hundred five",
        412: "four hundred twelve",
    }
    assert {number: in_words(number) for number in numbers} == numbers
    assert len({in_words(number) for number in range(1000)}) == 1000


def test_held_out_numbers_are_neither_trained_nor_shown(tmp_path: Path) -> None:
    make_rows(tmp_path, seed=0)
    rows = {name: read_rows(tmp_path / f"{name}.jsonl") for name in ("train", "held_out")}

    numbers = {name: {row.reward_model.ground_truth for row in found} for name, found in rows.items()}
    assert {name: len(found) for name, found in rows.items()} == {"train": 1000, "held_out": 128}
    assert len(numbers["held_out"]) == 128 and not numbers["held_out"] & (numbers["train"] | set(map(str, EXAMPLES)))
    row = rows["held_out"][0]
    assert [message.role for message in row.prompt] == ["system", *("user", "assistant") * 2, "user"]
    assert row.prompt[-1].content == in_words(int(str(row.reward_model.ground_truth)))
    answered = [json.loads(line)["messages"] for line in (tmp_path / "answered.jsonl").read_text().splitlines()]
    assert [[message["content"] for message in messages] for messages in answered] == [
        [*(message.content for message in row.prompt), row.reward_model.ground_truth] for row in rows["train"]
    ]
    assert {messages[-1]["role"] for messages in answered} == {"assistant"}


def test_rows_are_the_same_for_the_same_seed_alone(tmp_path: Path) -> None:
    texts: list[str] = []
    for number, seed in enumerate((0, 0, 1)):
        (folder := tmp_path / str(number)).mkdir()
        make_rows(folder, seed)
        texts.append((folder / "train.jsonl").read_text())

    assert texts[0] == texts[1] != texts[2]
    assert json.loads(texts[0].splitlines()[0])["data_source"] == "trackway/number_words"


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("answer", "acc", "in_form"),
    [
        ("305<|im_end|>", 1, 1),
        ("305", 1, 1),
        ("350<|im_end|>", 0, 1),
        ("305.<|im_end|>", 0, 0),
        ("three hundred", 0, 0),
    ],
)
async def test_only_the_number_itself_is_rewarded(answer: str, acc: int, in_form: int) -> None:
    scorer = scorer_of_file(RewardFunction(path=EXAMPLE / "reward.py"))
    request = ScoreRequest(data_source="trackway/number_words", solution_str=answer, ground_truth="305")

    assert await scorer.score(request, "default") == Reward(score=acc, components={"acc": acc, "in_form": in_form})


def test_the_configuration_trains_an_adapter_on_whole_groups() -> None:
    config = compose([], EXAMPLE / "trackway.yaml")

    policy = config.actor_rollout_ref
    assert (policy.model.lora_rank, policy.model.path) == (16, "model")
    assert config.trackway.ignored_keys == []
    assert policy.rollout.max_num_seqs == config.data.train_batch_size * policy.rollout.n
