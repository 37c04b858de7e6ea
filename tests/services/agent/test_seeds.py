from trackway.agent.loop import request_seed
from trackway.wire.trajectory import Tags


def tags(**changes: object) -> Tags:
    fields = {"experiment_name": "exp", "step": 3, "sample_index": 7, "rollout_n": 1, "validate": False, **changes}
    return Tags.model_validate(fields)


def test_a_seed_is_the_hash_of_what_the_trajectory_is() -> None:
    # printf 42/False/3/7/1/0 | sha256sum | head -c 8
    assert request_seed(42, tags(), turn=0) == 0x67F8E9F9


def test_each_coordinate_changes_the_seed() -> None:
    others = [tags(step=4), tags(sample_index=8), tags(rollout_n=2), tags(validate=True)]
    seeds = {
        request_seed(42, tags(), 0),
        request_seed(43, tags(), 0),
        request_seed(42, tags(), 1),
        request_seed(42, tags(), 0, part=1),
        *(request_seed(42, changed, 0) for changed in others),
    }

    assert len(seeds) == 8


def test_the_name_of_the_experiment_does_not_change_the_seed() -> None:
    assert request_seed(42, tags(experiment_name="other"), 0) == request_seed(42, tags(), 0)


def test_no_seed_stays_no_seed() -> None:
    assert request_seed(None, tags(), 0) is None
