"""What may change of a run's configuration when it is resumed."""

import pytest

from trackway.run_config import compose
from trackway.run_config.compose import CHANGEABLE, changed, given, known_keys
from trackway.wire.errors import ErrorCode, TrackwayError

BEGAN = ["trackway.learner_ranks=2", "actor_rollout_ref.actor.optim.lr=0.5", "trackway.max_samples=first"]


def test_ranks_change_and_everything_else_stays():
    began = compose(BEGAN)

    now = changed(began, given(["trackway.learner_ranks=8", "++trainer.nnodes=2"]))

    assert (now.placement.ranks, now.placement.nodes) == (8, 2)
    assert now == compose([*BEGAN, "trackway.learner_ranks=8", "trainer.nnodes=2"])
    assert changed(began, {}) is began


def test_other_keys_are_refused_by_name():
    with pytest.raises(TrackwayError) as refused:
        changed(compose(BEGAN), given(["trackway.seed=3", "trackway.learner_ranks=1", "data.train_batch_size=4"]))

    assert refused.value.code is ErrorCode.INVALID_REQUEST
    assert refused.value.message.startswith("data.train_batch_size, trackway.seed: expected no other value for a resum")
    assert "may change trainer.total_training_steps, trackway.learner_ranks, " in refused.value.message


def test_a_key_that_no_configuration_has_is_refused_before_the_run_is_asked():
    with pytest.raises(TrackwayError, match=r"trackway.learner_rank"):
        given(["trackway.learner_rank=1"])
    with pytest.raises(TrackwayError, match=r"expected key=value, got the deletion '~trackway.learner_ranks'"):
        given(["~trackway.learner_ranks"])


def test_what_may_change_is_known():
    assert set(CHANGEABLE) <= known_keys().keys()
