from pathlib import Path

import pytest

from trackway.clients.weights import WeightStore
from trackway.run_config import compose
from trackway.trainer.loop.from_config import (
    anchor_every,
    learner_config,
    trace_target,
    training_template,
    validation_template,
)
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.trajectory import TraceBackend, TraceTarget

TARGET = TraceTarget(mlflow_experiment_id="7")


def test_verl_counts_prompts_where_the_learner_counts_trajectories():
    config = compose(
        [
            "data.train_batch_size=64",
            "actor_rollout_ref.actor.ppo_mini_batch_size=32",
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
            "actor_rollout_ref.rollout.n=8",
            "actor_rollout_ref.model.path=m",
        ]
    )

    learner = learner_config(config, total_steps=30)

    assert (learner.mini_batch_size, learner.update_limit.rows) == (256, 4)


def test_a_micro_batch_is_never_larger_than_the_mini_batch():
    config = compose([], config_name="tiny_demo")

    assert learner_config(config, total_steps=30).update_limit.rows == 96


def test_validation_is_greedy_unless_it_samples():
    warm = "actor_rollout_ref.rollout.val_kwargs.temperature=0.7"
    samples = "actor_rollout_ref.rollout.val_kwargs.do_sample=true"

    assert validation_template(compose([warm]), "run", TraceTarget()).sampling_params.temperature == 0.0
    assert validation_template(compose([warm, samples]), "run", TraceTarget()).sampling_params.temperature == 0.7


def test_training_and_validation_ask_for_the_same_agent_within_the_same_limits():
    config = compose(["actor_rollout_ref.rollout.multi_turn.max_assistant_turns=3", "data.max_response_length=99"])

    training, validation = training_template(config, "run", TARGET), validation_template(config, "run", TARGET)

    assert training.limits == validation.limits
    assert (training.limits.max_assistant_turns, training.limits.max_response_length) == (3, 99)
    assert (training.validation, validation.validation) == (False, True)
    assert (training.trace_target, validation.trace_target) == (TARGET, TARGET)


@pytest.mark.parametrize("line", ["trackway.on_bad_call=stop", "trackway.max_tool_response_tokens=0"])
def test_a_bound_on_tool_calls_that_makes_no_sense_is_refused(line: str):
    with pytest.raises(TrackwayError) as caught:
        compose([line])

    assert (caught.value.code, line.partition("=")[0] in caught.value.message) == (ErrorCode.INVALID_REQUEST, True)


TRACE = "actor_rollout_ref.rollout.trace"


def test_the_tag_experiment_name_is_the_trace_sections_own_or_the_trainers():
    assert training_template(compose(["trainer.experiment_name=a"]), "run", TARGET).experiment_name == "a"
    own = compose(["trainer.experiment_name=a", f"{TRACE}.experiment_name=b"])
    assert (
        training_template(own, "run", TARGET).experiment_name,
        validation_template(own, "run", TARGET).experiment_name,
    ) == (
        "b",
        "b",
    )


def test_traces_of_a_run_that_names_no_backend_are_left_to_the_services():
    assert trace_target(compose([]), "7", "r") == TraceTarget(mlflow_experiment_id="7", mlflow_run_id="r")


def test_traces_go_to_the_runs_backends_with_or_without_text():
    plain = trace_target(compose([f"{TRACE}.backend=mlflow"]), "7", "r")
    texts = trace_target(compose([f"{TRACE}.backend=[otlp,mlflow]", f"{TRACE}.token2text=true"]))

    assert (plain.backends, plain.token2text) == ((TraceBackend.MLFLOW,), False)
    assert (plain.mlflow_experiment_id, plain.mlflow_run_id, plain.weave_project) == ("7", "r", None)
    assert (texts.backends, texts.token2text) == ((TraceBackend.OTLP, TraceBackend.MLFLOW), True)


@pytest.mark.parametrize(
    ("project", "entity", "expected"),
    [
        ("me/gsm8k", None, "me/gsm8k"),
        ("me/gsm8k", "you", "me/gsm8k"),
        ("gsm8k", "you", "you/gsm8k"),
        (None, "you", "you/trackway"),
    ],
)
def test_a_weave_project_is_the_traces_project_with_its_entity_or_that_of_the_environment(
    monkeypatch, project: str | None, entity: str | None, expected: str
):
    monkeypatch.setenv("WANDB_ENTITY", entity or "")
    own = [f"{TRACE}.project_name={project}"] if project else []

    target = trace_target(compose([f"{TRACE}.backend=weave", "trackway.wandb_run_id=r1", *own]))

    assert (target.weave_project, target.wandb_run_id) == (expected, "r1")


@pytest.mark.parametrize("project", ["gsm8k", "a/b/c", "/gsm8k", "me/"])
def test_a_weave_project_without_an_entity_is_refused_with_the_remedy(monkeypatch, project: str):
    monkeypatch.delenv("WANDB_ENTITY", raising=False)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)

    with pytest.raises(TrackwayError) as caught:
        trace_target(compose([f"{TRACE}.backend=[mlflow,weave]", f"{TRACE}.project_name={project}"]))

    assert caught.value.code is ErrorCode.INVALID_REQUEST
    assert caught.value.message == (
        f"{TRACE}.project_name: expected entity/project for Weave, got {project!r}; "
        "add the entity, or set WANDB_ENTITY in the environment of the trainer service"
    )


@pytest.mark.parametrize(
    ("device", "dtype", "computes_in"),
    [
        ("cpu", "auto", "float32"),
        ("cuda", "auto", "bfloat16"),
        ("cuda:1", "auto", "bfloat16"),
        ("cuda", "float32", "float32"),
        ("cpu", "bfloat16", "bfloat16"),
    ],
)
def test_the_learner_computes_in_what_suits_its_device(device: str, dtype: str, computes_in: str) -> None:
    config = compose([f"trackway.device={device}", f"trackway.dtype={dtype}"])
    assert learner_config(config, 1).dtype == computes_in


def test_one_version_of_eight_in_an_object_store_is_whole_and_each_in_a_folder(tmp_path: Path) -> None:
    bucket, folder = WeightStore("memory://store"), WeightStore(str(tmp_path))
    given = compose(["trackway.weights_anchor_every=3"])

    assert [anchor_every(compose([]), store) for store in (bucket, folder)] == [8, 0]
    assert [anchor_every(given, store) for store in (bucket, folder)] == [3, 3]
