"""Versions of rollouts from before a restart, as a process counts them that has published its weights again."""

from collections.abc import Callable, Sequence

import pytest

from trackway.trainer.loop.schedule import Republication, WeightVersions
from trackway.wire.trajectory import Trajectory, WeightSpan


def spans(versions: Sequence[int]) -> list[WeightSpan]:
    """One token of each version, on a KV cache of the first."""
    return [
        WeightSpan(version=version, start=place, end=place + 1, kv_version=versions[0] if place else None)
        for place, version in enumerate(versions)
    ]


def test_each_first_publication_of_a_resumed_run_is_one_of_its_checkpoints_weights():
    versions = WeightVersions().published(3, resumed=True).published(4, resumed=False)
    loaded = WeightVersions.model_validate_json(versions.model_dump_json())

    assert versions == WeightVersions(newest=4)
    assert loaded.published(9, resumed=True).published(10, resumed=False) == WeightVersions(
        newest=10, republications=(Republication(4, 9),)
    )


@pytest.mark.parametrize(
    ("republications", "sampled", "counted"),
    [
        ([], [3, 4], [3, 4]),
        ([(4, 5)], [2, 3, 4], [3, 4, 5]),
        ([(4, 9)], [4, 9, 10], [9, 9, 10]),
        ([(4, 9), (10, 11)], [3, 4, 9, 10, 11], [9, 10, 10, 11, 11]),
    ],
)
def test_a_token_is_as_old_as_if_its_weights_had_been_published_by_this_process(
    rollout: Callable[..., Trajectory],
    republications: Sequence[tuple[int, int]],
    sampled: list[int],
    counted: list[int],
):
    versions = WeightVersions(newest=11, republications=tuple(Republication(*pair) for pair in republications))
    trajectory = rollout(0, 0, 1.0, weight_versions=spans(sampled))

    renumbered = versions.renumbered(trajectory)

    assert renumbered.weight_versions == spans(counted)
    assert (renumbered is trajectory) == (sampled == counted)
