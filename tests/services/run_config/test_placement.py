"""The ranks of a learner and their nodes, from a run's keys."""

import pytest

from trackway.run_config import compose
from trackway.run_config.placement import Placement
from trackway.wire.errors import TrackwayError

RANKS, NODES, GPUS = "trackway.learner_ranks", "trainer.nnodes", "trainer.n_gpus_per_node"
DEVICE = "trackway.device"


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, Placement(1, 1)),
        ({GPUS: 8}, Placement(8, 1)),
        ({GPUS: 8, RANKS: 1}, Placement(1, 1)),
        ({GPUS: 8, DEVICE: "cpu"}, Placement(1, 1)),
        ({GPUS: 8, DEVICE: "cuda:1"}, Placement(1, 1)),
        ({RANKS: 4}, Placement(4, 1)),
        ({NODES: 2}, Placement(2, 2)),
        ({NODES: 2, GPUS: 8}, Placement(16, 2)),
        ({NODES: 2, GPUS: 0}, Placement(2, 2)),
        ({NODES: 2, GPUS: 8, DEVICE: "cpu"}, Placement(2, 2)),
        ({NODES: 2, GPUS: 8, RANKS: 4}, Placement(4, 2)),
        ({NODES: 2, GPUS: 8, RANKS: 1}, Placement(1, 1)),
    ],
)
def test_ranks_are_divided_over_the_nodes(keys: dict[str, int | str], expected: Placement) -> None:
    assert compose([f"{key}={value}" for key, value in keys.items()]).placement == expected


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            [f"{NODES}=2", f"{RANKS}=3"],
            r"learner_ranks: expected a multiple of trainer\.nnodes \(2\), or 1, got 3; change",
        ),
        (
            [f"{NODES}=2", f"{GPUS}=2", f"{RANKS}=8"],
            r"learner_ranks: expected at most 4 \(trainer\.nnodes x .*, got 8; ",
        ),
    ],
)
def test_ranks_that_do_not_fit_the_nodes_are_refused(keys: list[str], message: str) -> None:
    with pytest.raises(TrackwayError, match=message):
        compose(keys)


def test_ranks_of_a_node_follow_one_another() -> None:
    placement = Placement(6, 3)

    assert [placement.node(rank) for rank in range(6)] == [0, 0, 1, 1, 2, 2]
    assert [placement.local_rank(rank) for rank in range(6)] == [0, 1, 0, 1, 0, 1]


def test_too_few_nodes_are_named_with_what_they_lack() -> None:
    able = {"CPU": 8.0, "GPU": 2.0, "trackway_learner": 1.0}
    offer = "trackway_learner 1, CPU 2, GPU 2 each"
    expected = f"trainer.nnodes: expected 2 Ray nodes besides the trainer's, offering {offer}, got "

    assert Placement(6, 3).shortage([able, able, {"CPU": 64.0}], with_gpus=True) == ""
    assert Placement(6, 3).shortage([able, {**able, "GPU": 1.0}], with_gpus=True) == f"{expected}1"
    assert Placement(6, 3).shortage([], with_gpus=True) == f"{expected}none"
    assert Placement(2, 2).described(with_gpus=False) == (
        "1 Ray node besides the trainer's, offering trackway_learner 1, CPU 1"
    )
