"""What `algorithm.rollout_correction` accepts: bounds, lists of criteria, presets; what it refuses has a remedy."""

import math
from pathlib import Path

import pytest
from pydantic import JsonValue

from trackway.run_config import RunConfig, compose, resolve
from trackway.run_config.rollout_correction import (
    PRESETS,
    REJECTIONS,
    Rejection,
    RolloutCorrectionConfig,
    describe,
)
from trackway.trainer.loop.from_config import learner_config
from trackway.wire.errors import TrackwayError

SECTION = "algorithm.rollout_correction"


def correction(**keys: JsonValue) -> RolloutCorrectionConfig:
    return RolloutCorrectionConfig.model_validate(keys)


def composed(*overrides: str, file: Path | None = None) -> RolloutCorrectionConfig:
    return compose(list(overrides), file).algorithm.rollout_correction


def test_the_defaults_are_those_of_verls_yaml_but_for_auto():
    assert RunConfig().algorithm.rollout_correction.model_dump() == {
        "rollout_is": "auto",
        "rollout_is_threshold": 2.0,
        "rollout_is_batch_normalize": False,
        "rollout_rs": None,
        "rollout_rs_threshold": None,
        "bypass_mode": False,
        "loss_type": "ppo_clip",
    }


@pytest.mark.parametrize(
    ("given", "bounds"),
    [(2.0, (None, 2.0)), ("3", (None, 3.0)), (" 1.5 ", (None, 1.5)), ("0.5_5.0", (0.5, 5.0)), ("2_2", (2.0, 2.0))],
)
def test_one_number_truncates_and_two_are_icepops_bounds(given: float | str, bounds: tuple[float | None, float]):
    assert correction(rollout_is="token", rollout_is_threshold=given).is_bounds == bounds


def test_the_bounds_of_k1_are_logarithms_and_of_the_others_plain():
    keys = correction(rollout_rs="token_k1, seq_mean_k3", rollout_rs_threshold="0.5_4.0, 0.01")

    assert keys.rejections == (
        Rejection("token_k1", math.log(0.5), math.log(4.0)),
        Rejection("seq_mean_k3", None, 0.01),
    )


def test_a_single_bound_of_k1_is_mirrored():
    (only,) = correction(rollout_rs="seq_sum_k1", rollout_rs_threshold=4).rejections

    assert (only.name, only.high) == ("seq_sum_k1", math.log(4))
    assert only.low == pytest.approx(-math.log(4))


def test_one_bound_is_shared_by_all_names_and_a_name_counts_once():
    keys = correction(rollout_rs="token_k2,seq_max_k3,token_k2", rollout_rs_threshold="0.3")

    assert keys.rejections == (Rejection("token_k2", None, 0.3), Rejection("seq_max_k3", None, 0.3))


def test_every_name_of_verl_is_known():
    keys = correction(rollout_rs=",".join(REJECTIONS), rollout_rs_threshold=2.0)

    assert [rejection.name for rejection in keys.rejections] == [
        *("token_k1", "token_k2", "token_k3"),
        *("seq_sum_k1", "seq_sum_k2", "seq_sum_k3"),
        *("seq_mean_k1", "seq_mean_k2", "seq_mean_k3"),
        *("seq_max_k2", "seq_max_k3"),
    ]


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"rollout_is_threshold": 0}, "rollout_is_threshold: expected a positive number, or two as 'lo_hi', got '0"),
        ({"rollout_is_threshold": "a_2"}, "expected a positive number, or two as 'lo_hi', got 'a_2'"),
        ({"rollout_is_threshold": "1_2_3"}, "expected a positive number, or two as 'lo_hi', got '1_2_3'"),
        ({"rollout_is_threshold": ""}, "expected a positive number, or two as 'lo_hi', got ''"),
        ({"rollout_is_threshold": "-1_2"}, "expected a positive number, or two as 'lo_hi', got '-1_2'"),
        ({"rollout_is_threshold": "3_2"}, "rollout_is_threshold: expected lo <= hi in 'lo_hi', got '3_2'"),
        ({"rollout_is_threshold": True}, "expected a number or 'lo_hi', got true"),
        ({"rollout_is": "token", "rollout_is_threshold": None}, "expected a bound for rollout_is, got null"),
        ({"rollout_rs": "token_k4", "rollout_rs_threshold": 2}, "expected names from token_k1, token_k2"),
        ({"rollout_rs": " ,", "rollout_rs_threshold": 2}, "rollout_rs: expected names from"),
        ({"rollout_rs": "token_k1"}, "expected one bound, or one for each of the 1 names of rollout_rs, got None"),
        (
            {"rollout_rs": "token_k1,token_k2,token_k3", "rollout_rs_threshold": "2,3"},
            "expected one bound, or one for each of the 3 names of rollout_rs, got '2,3'",
        ),
        (
            {"rollout_rs": "token_k2", "rollout_rs_threshold": "0.5_2.0"},
            "expected one upper bound for token_k2, got '0.5_2.0'",
        ),
        (
            {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": 0.9},
            "expected at least 1, or 'lo_hi', for seq_mean_k1, got '0.9'",
        ),
        ({"loss_type": "reinforce"}, "expected ppo_clip without bypass_mode, got reinforce; set bypass_mode=true"),
    ],
)
def test_bounds_and_names_that_do_not_fit_are_refused(keys: dict[str, JsonValue], problem: str):
    with pytest.raises(TrackwayError) as caught:
        resolve({f"{SECTION}.{name}": value for name, value in keys.items()})

    assert problem in caught.value.message


def test_estimated_old_logprobs_are_refused_where_the_samplers_are_the_old_ones():
    with pytest.raises(TrackwayError, match=r"proximal_logprobs: expected recompute with .*bypass_mode=true, got logl"):
        resolve({f"{SECTION}.bypass_mode": True, "trackway.proximal_logprobs": "loglinear"})


PUBLISHED = {
    "decoupled_token_is": ("token", 2.0, None, None, False, "ppo_clip"),
    "decoupled_seq_is": ("sequence", 2.0, None, None, False, "ppo_clip"),
    "decoupled_token_icepop": ("token", "0.5_5.0", None, None, False, "ppo_clip"),
    "decoupled_seq_is_rs": ("sequence", 2.0, "seq_sum_k1", "0.5_2.0", False, "ppo_clip"),
    "decoupled_geo_rs": (None, 2.0, "seq_mean_k1", "0.999_1.001", False, "ppo_clip"),
    "decoupled_geo_rs_seq_tis": ("sequence", 2.0, "seq_mean_k1", "0.999_1.001", False, "ppo_clip"),
    "decoupled_geo_rs_token_tis": ("token", 2.0, "seq_mean_k1", "0.999_1.001", False, "ppo_clip"),
    "decoupled_k3_rs": (None, 2.0, "seq_mean_k3", 0.01, False, "ppo_clip"),
    "decoupled_k3_rs_seq_tis": ("sequence", 2.0, "seq_mean_k3", 0.01, False, "ppo_clip"),
    "decoupled_k3_rs_token_tis": ("token", 2.0, "seq_mean_k3", 0.01, False, "ppo_clip"),
    "bypass_ppo_clip": (None, 2.0, None, None, True, "ppo_clip"),
    "bypass_ppo_clip_geo_rs": (None, 2.0, "seq_mean_k1", "0.999_1.001", True, "ppo_clip"),
    "bypass_ppo_clip_k3_rs": (None, 2.0, "seq_mean_k3", 0.01, True, "ppo_clip"),
    "bypass_pg_is": ("sequence", 2.0, None, None, True, "reinforce"),
    "bypass_pg_token_icepop": ("token", "0.5_5.0", None, None, True, "reinforce"),
    "bypass_pg_geo_rs": (None, 2.0, "seq_mean_k1", "0.999_1.001", True, "reinforce"),
    "bypass_pg_geo_rs_seq_tis": ("sequence", 2.0, "seq_mean_k1", "0.999_1.001", True, "reinforce"),
    "bypass_pg_geo_rs_token_tis": ("token", 2.0, "seq_mean_k1", "0.999_1.001", True, "reinforce"),
    "disabled": (None, 2.0, None, None, False, "ppo_clip"),
}
"""rollout_is, its threshold, rollout_rs, its threshold, bypass_mode, loss_type as verl's class methods set them."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_sets_what_verls_sets(name: str):
    keys = composed(f"{SECTION}={name}")

    values = (keys.rollout_is, keys.rollout_is_threshold, keys.rollout_rs, keys.rollout_rs_threshold)
    assert (*values, keys.bypass_mode, keys.loss_type) == PUBLISHED[name]
    assert resolve({SECTION: name}).algorithm.rollout_correction == keys


def test_there_is_no_other_preset():
    assert PRESETS.keys() == PUBLISHED.keys()
    with pytest.raises(
        TrackwayError, match=r"expected keys or one of verl's presets, decoupled_token_is, .* got 'tis'"
    ):
        composed(f"{SECTION}=tis")


def test_null_is_no_correction():
    assert composed(f"{SECTION}=null") == correction(rollout_is=None)


STALE: dict[str, JsonValue] = {"async_training.staleness_threshold": 0.5}
OFTEN_TRAINED: dict[str, JsonValue] = {"async_training.trigger_parameter_sync_step": 2}


@pytest.mark.parametrize(
    ("keys", "level"),
    [
        ({}, None),
        (STALE, "token"),
        (OFTEN_TRAINED, "token"),
        ({**STALE, f"{SECTION}.rollout_is": "sequence"}, "sequence"),
        ({**STALE, f"{SECTION}.rollout_is": None}, None),
        ({**STALE, SECTION: "disabled"}, None),
        ({**STALE, SECTION: None}, None),
        ({**STALE, f"{SECTION}.bypass_mode": True}, None),
        ({**STALE, f"{SECTION}.rollout_rs": "token_k2", f"{SECTION}.rollout_rs_threshold": 1}, None),
        ({**STALE, "trackway.proximal_logprobs": "loglinear"}, "token"),
    ],
)
def test_stale_data_without_a_choice_gets_truncated_token_weights(keys: dict[str, JsonValue], level: str | None):
    config = resolve(keys)
    learner = learner_config(config, total_steps=1)

    assert learner.algorithm.rollout_correction == config.correction
    assert (config.correction.rollout_is, config.correction.rollout_is_threshold) == (level, 2.0)
    assert resolve(config.model_dump(mode="json")).correction == config.correction


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({}, "none"),
        ({"rollout_is": "token"}, "token importance weights, at most 2"),
        (
            {"rollout_is": "sequence", "rollout_is_threshold": "0.5_5.0"},
            "sequence importance weights, zero outside 0.5 to 5",
        ),
        (
            {
                "bypass_mode": True,
                "loss_type": "reinforce",
                "rollout_rs": "token_k1",
                "rollout_rs_threshold": "0.5_2.0",
            },
            "rejection by token_k1, bounds 0.5_2.0; reinforce against the sampler's logprobs",
        ),
    ],
)
def test_a_correction_is_described_in_words(keys: dict[str, JsonValue], words: str):
    assert describe(correction(**keys)) == words


def test_a_key_after_a_preset_changes_it():
    keys = composed(f"{SECTION}=bypass_pg_is", f"{SECTION}.rollout_is_threshold=3")

    assert keys == correction(rollout_is="sequence", rollout_is_threshold=3.0, bypass_mode=True, loss_type="reinforce")


def test_a_key_does_not_silently_replace_the_preset_of_a_file(tmp_path: Path):
    file = tmp_path / "run.yaml"
    file.write_text("defaults: [ppo_trainer, _self_]\nalgorithm: {rollout_correction: bypass_pg_is}\n")

    assert composed(file=file) == correction(rollout_is="sequence", bypass_mode=True, loss_type="reinforce")
    with pytest.raises(TrackwayError, match="a preset in the file and rollout_is_threshold on the command line"):
        composed(f"{SECTION}.rollout_is_threshold=3", file=file)
    both = (f"{SECTION}=decoupled_token_is", f"{SECTION}.rollout_is_threshold=3")
    assert composed(*both, file=file) == correction(rollout_is="token", rollout_is_threshold=3.0)


@pytest.mark.parametrize("text", ["0.5_2", "1_2"])
def test_bounds_that_hydra_reads_as_one_number_are_refused(text: str):
    with pytest.raises(
        TrackwayError, match=f"expected 'lo_hi' with decimals or in quotes, got {text}, which is the num"
    ):
        composed(f"{SECTION}.rollout_is_threshold={text}")

    assert composed(f"{SECTION}.rollout_is_threshold='{text}'").rollout_is_threshold == text
