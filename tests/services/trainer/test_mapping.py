import pytest

from trackway.trainer.config import compose
from trackway.trainer.mapping import learner_config, plan, trace_target, training_ask, validation_ask
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.tracing import TraceBackend, TraceTarget

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

    assert (learner.mini_batch_size, learner.micro_batch_size) == (256, 4)


def test_a_micro_batch_is_never_larger_than_the_mini_batch():
    config = compose([], config_name="tiny_demo")

    assert learner_config(config, total_steps=30).micro_batch_size == 96


@pytest.mark.parametrize(
    ("overrides", "low", "high"),
    [
        ([], 0.2, 0.2),
        (["actor_rollout_ref.actor.clip_ratio=0.1"], 0.1, 0.1),
        (["actor_rollout_ref.actor.clip_ratio_high=0.28"], 0.2, 0.28),
        (["actor_rollout_ref.actor.clip_ratio=0.1", "actor_rollout_ref.actor.clip_ratio_low=0.0"], 0.0, 0.1),
    ],
)
def test_one_clip_ratio_stands_for_both_unless_one_is_given(overrides: list[str], low: float, high: float):
    learner = learner_config(compose(overrides), total_steps=30)

    assert (learner.clip_ratio_low, learner.clip_ratio_high) == (low, high)


def test_old_logprobs_are_the_samplers_own_only_in_bypass_mode():
    assert learner_config(compose([]), 30).recompute_old_logprobs is True
    bypassed = compose(["algorithm.rollout_correction.bypass_mode=true"])
    assert learner_config(bypassed, 30).recompute_old_logprobs is False


def test_every_optimiser_key_reaches_the_learner():
    optim = "actor_rollout_ref.actor.optim"
    config = compose(
        [
            f"{optim}.lr=0.5",
            f"{optim}.betas=[0.1,0.2]",
            f"{optim}.weight_decay=3",
            f"{optim}.clip_grad=4",
            f"{optim}.lr_scheduler_type=cosine",
            f"{optim}.min_lr_ratio=0.5",
        ]
    )

    learner = learner_config(config, total_steps=30)

    assert (learner.lr, learner.betas, learner.weight_decay, learner.clip_grad) == (0.5, (0.1, 0.2), 3.0, 4.0)
    assert (learner.lr_scheduler_type, learner.min_lr_ratio, learner.total_updates) == ("cosine", 0.5, 30)


@pytest.mark.parametrize(
    ("overrides", "steps"),
    [([], 0), (["lr_warmup_steps_ratio=0.15"], 4), (["lr_warmup_steps=3", "lr_warmup_steps_ratio=0.5"], 3)],
)
def test_a_warm_up_is_given_in_steps_or_as_a_share_of_the_run(overrides: list[str], steps: int):
    config = compose([f"actor_rollout_ref.actor.optim.{one}" for one in overrides])

    assert learner_config(config, total_steps=30).lr_warmup_steps == steps


def test_the_learners_passes_offload_and_packing_follow_their_keys():
    ours = "actor_rollout_ref"
    config = compose(
        [
            f"{ours}.model.use_remove_padding=false",
            f"{ours}.actor.fsdp_config.param_offload=true",
            f"{ours}.ref.fsdp_config.param_offload=true",
            f"{ours}.rollout.log_prob_micro_batch_size_per_gpu=4",
            f"{ours}.ref.log_prob_micro_batch_size_per_gpu=8",
            "data.max_response_length=99",
        ]
    )

    learner, scaled = (learner_config(one, 30) for one in (config, compose([f"{ours}.actor.loss_scale_factor=7"])))

    assert (learner.remove_padding, learner.param_offload, learner.optimizer_offload) == (False, True, False)
    assert (learner.ref_param_offload, scaled.remove_padding, scaled.ref_param_offload) == (True, True, False)
    assert (learner.log_prob_micro_batch_size, learner.ref_micro_batch_size) == (4, 8)
    assert (learner.loss_scale_factor, scaled.loss_scale_factor) == (99.0, 7.0)


def test_the_number_of_steps_is_given_or_follows_from_the_epochs():
    assert plan(compose(["trainer.total_epochs=15"]), steps_per_epoch=29).total_steps == 435
    assert plan(compose(["trainer.total_training_steps=7"]), steps_per_epoch=29).total_steps == 7


def test_validation_only_is_a_run_of_no_steps():
    only = plan(compose(["trainer.val_only=true", "trainer.val_before_train=false"]), steps_per_epoch=29)

    assert (only.total_steps, only.val_before_train) == (0, True)


def test_validation_is_greedy_unless_it_samples():
    warm = "actor_rollout_ref.rollout.val_kwargs.temperature=0.7"
    samples = "actor_rollout_ref.rollout.val_kwargs.do_sample=true"

    assert validation_ask(compose([warm]), "run", TraceTarget()).sampling_params.temperature == 0.0
    assert validation_ask(compose([warm, samples]), "run", TraceTarget()).sampling_params.temperature == 0.7


def test_training_and_validation_ask_for_the_same_agent_within_the_same_limits():
    config = compose(["actor_rollout_ref.rollout.multi_turn.max_assistant_turns=3", "data.max_response_length=99"])

    training, validation = training_ask(config, "run", TARGET), validation_ask(config, "run", TARGET)

    assert training.limits == validation.limits
    assert (training.limits.max_assistant_turns, training.limits.max_response_length) == (3, 99)
    assert (training.validation, validation.validation) == (False, True)
    assert (training.trace_target, validation.trace_target) == (TARGET, TARGET)


def test_what_bounds_tool_calls_reaches_the_limits():
    turns = "actor_rollout_ref.rollout.multi_turn"
    config = compose(
        [
            f"{turns}.max_parallel_calls=4",
            f"{turns}.max_tool_response_length=null",
            f"{turns}.tool_response_truncate_side=left",
            "trackway.max_tool_response_tokens=256",
            "trackway.on_bad_call=end",
        ]
    )

    limits, defaults = (training_ask(one, "run", TARGET).limits for one in (config, compose([])))

    assert (limits.max_parallel_calls, limits.tool_response_truncate_side) == (4, "left")
    assert (limits.max_tool_response_length, limits.max_tool_response_tokens) == (None, 256)
    assert limits.on_bad_call == "end"
    assert (defaults.max_tool_response_length, defaults.max_tool_response_tokens) == (256, None)
    assert defaults.on_bad_call == "observe"


@pytest.mark.parametrize("line", ["trackway.on_bad_call=stop", "trackway.max_tool_response_tokens=0"])
def test_a_bound_on_tool_calls_that_makes_no_sense_is_refused(line: str):
    with pytest.raises(TrackwayError) as caught:
        compose([line])

    assert (caught.value.code, line.partition("=")[0] in caught.value.message) == (ErrorCode.INVALID_REQUEST, True)


def test_generations_are_seeded_so_that_rollouts_can_be_repeated():
    config = compose(["trackway.seed=5"])

    assert training_ask(config, "run", TraceTarget()).sampling_params.seed == 5
    assert validation_ask(config, "run", TraceTarget()).sampling_params.seed == 5


@pytest.mark.parametrize(("enable", "agent"), [("true", "tool_agent"), ("false", "single_turn_agent")])
def test_rows_without_an_agent_get_the_one_that_multi_turn_says(enable: str, agent: str):
    config = compose([f"actor_rollout_ref.rollout.multi_turn.enable={enable}"])

    assert training_ask(config, "run", TraceTarget()).default_agent == agent


TRACE = "actor_rollout_ref.rollout.trace"


def test_the_tag_experiment_name_is_the_trace_sections_own_or_the_trainers():
    assert training_ask(compose(["trainer.experiment_name=a"]), "run", TARGET).experiment_name == "a"
    own = compose(["trainer.experiment_name=a", f"{TRACE}.experiment_name=b"])
    assert (training_ask(own, "run", TARGET).experiment_name, validation_ask(own, "run", TARGET).experiment_name) == (
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
        "write it so, or set WANDB_ENTITY in the environment of the trainer service"
    )


def test_the_bound_on_staleness_and_the_rollouts_of_a_prompt_reach_the_plan():
    made = plan(compose(["trackway.max_staleness=2", "actor_rollout_ref.rollout.n=16"]), steps_per_epoch=1)

    assert (made.max_staleness, made.rollouts, plan(compose([]), 1).max_staleness) == (2, 16, None)


@pytest.mark.parametrize("side", ["left", "right", "middle", "error"])
def test_truncation_is_a_limit_of_every_trajectory(side: str):
    config = compose([f"data.truncation={side}", "data.max_prompt_length=9"])

    limits = training_ask(config, "r", TARGET).limits

    assert (limits.max_prompt_length, limits.prompt_truncation) == (9, side)
    assert validation_ask(config, "r", TARGET).limits == limits


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
