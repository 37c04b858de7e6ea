"""verl's own configuration and example scripts: every key is known, and what Trackway lacks is listed by a dry run."""

from pathlib import Path
from textwrap import dedent

import pytest
import yaml
from pydantic import JsonValue
from typer.testing import CliRunner, Result

from tests.services.trainer.loop.test_from_config_keys import KEYS, OF_VALUE_MODEL, TOGETHER
from tests.verl_recipes.consumers import is_read, names_in_test, reads_of, unparsed
from trackway.main_ppo import app
from trackway.run_config import explain, no_effect, resolve
from trackway.run_config.compose import known_keys
from trackway.run_config.unsupported_keys import MOVED, limited, without_effect

HERE = Path(__file__).parent
DEFAULTS: dict[str, JsonValue] = yaml.safe_load((HERE / "ppo_trainer.yaml").read_text())
"""Every key of verl 0.9.1 with its default."""
EXAMPLES: dict[str, dict] = yaml.safe_load((HERE / "examples.yaml").read_text())
"""The arguments of verl's example scripts."""


_LEARNER = "services/trackway/learner"
_TESTS = "tests/services/trainer"
_SERVICES = "tests/deploy/config/test_services_for_run.py"
_PROJECT = "tests/deploy/runs/test_project.py"
_ASYNC = "tests/services/run_config/test_asynchronous.py"
_DATASET = f"{_TESTS}/data/test_dataset.py"
_BUILD = f"{_TESTS}/loop/test_build.py"
SEEN_BY: dict[str, str] = {
    f"{section}{name}": test
    for section, test, names in (
        (
            "actor_rollout_ref.rollout.",
            f"{_SERVICES}::test_eight_gpus_make_four_replicas_of_two_that_sleep_while_the_learner_works",
            ("name", "gpu_memory_utilization", "tensor_model_parallel_size"),
        ),
        (
            "actor_rollout_ref.rollout.",
            f"{_SERVICES}::test_every_engine_key_reaches_its_setting",
            ("dtype", "max_model_len", "max_num_seqs", "enable_prefix_caching"),
        ),
        (
            "actor_rollout_ref.rollout.",
            f"{_SERVICES}::test_a_build_of_vllm_for_the_cpu_is_used_when_one_is_named",
            ("enforce_eager",),
        ),
        (
            "actor_rollout_ref.rollout.engine_kwargs.",
            f"{_SERVICES}::test_arguments_of_the_engine_follow_those_of_the_file_on_its_command_line",
            ("vllm", "sglang"),
        ),
        (
            "actor_rollout_ref.rollout.",
            f"{_PROJECT}::test_the_services_of_a_project_get_its_modules_loops_tools_and_its_scorer",
            (
                *("multi_turn.tool_config_path", "multi_turn.function_tool_path", "multi_turn.format"),
                "agent.agent_loop_config_path",
            ),
        ),
        (
            "data.",
            f"{_SERVICES}::test_variables_of_the_chat_template_are_the_agent_services",
            ("apply_chat_template_kwargs",),
        ),
        ("data.", f"{_DATASET}::test_several_files_of_either_format_are_one_dataset", ("train_files", "val_files")),
        (
            "data.",
            f"{_DATASET}::test_a_bounded_number_of_rows_is_drawn_as_in_verl",
            ("shuffle", "seed", "train_max_samples", "val_max_samples"),
        ),
        (
            "data.",
            f"{_TESTS}/data/test_prompt_filter.py::test_the_schemas_are_the_servers_as_far_as_the_run_offers_them",
            ("filter_overlong_prompts",),
        ),
        (
            "reward.reward_manager.",
            "tests/services/run_config/test_compose.py::test_the_reward_managers_that_score_as_in_verl_are_accepted",
            ("name",),
        ),
        (
            "custom_reward_function.",
            f"{_SERVICES}::test_the_function_of_a_run_is_the_reward_services",
            ("path", "name"),
        ),
        (
            "reward.reward_model.",
            f"{_SERVICES}::test_a_reward_model_gets_a_service_of_its_own_and_the_reward_service_its_path",
            (
                *("enable", "model_path", "rollout.dtype", "rollout.max_num_seqs"),
                *("rollout.prompt_length", "rollout.response_length"),
            ),
        ),
        (
            "reward.reward_model.rollout.",
            f"{_SERVICES}::test_verls_old_spelling_of_a_reward_model_is_read_and_its_server_has_gpus_beside_the_runs",
            (
                *("name", "tensor_model_parallel_size", "gpu_memory_utilization", "enforce_eager"),
                *("enable_prefix_caching", "max_model_len"),
            ),
        ),
        (
            "trainer.",
            f"{_TESTS}/delivery/test_loggers.py::test_tensorboard_has_every_row_under_its_exact_name",
            ("logger",),
        ),
        (
            "trainer.",
            f"{_BUILD}::test_the_filter_the_penalty_the_samples_and_the_profiler_are_built_from_their_keys",
            ("rollout_data_dir", "validation_data_dir"),
        ),
        (
            "trainer.",
            f"{_TESTS}/loop/test_resume.py::test_a_named_checkpoint_gives_its_weights_and_place_but_not_its_row",
            ("resume_mode", "resume_from_path"),
        ),
        (
            "trainer.",
            f"{_TESTS}/run_state/test_folder.py"
            "::test_the_checkpoints_may_lie_elsewhere_but_not_beside_those_of_another_run",
            ("default_local_dir",),
        ),
        (
            "distillation.",
            "tests/services/trainer/loop/test_teaching.py::test_the_key_of_a_row_chooses_among_several_teachers",
            ("teacher_key", "teacher_models.teacher_model.key"),
        ),
        (
            "trainer.",
            f"{_ASYNC}::test_the_v1_trainers_mode_sync_leaves_the_decision_to_async_training",
            ("use_v1",),
        ),
        (
            "trainer.v1.",
            f"{_ASYNC}::test_the_v1_trainer_with_engines_on_its_gpus_publishes_after_each_batch_and_runs_ahead_by_part_of_one",
            ("trainer_mode", "colocate_async.num_warmup_batches"),
        ),
        (
            "trainer.v1.",
            f"{_ASYNC}::test_the_v1_trainer_with_separate_engines_publishes_after_each_batch",
            (
                *("separate_async.num_warmup_batches", "separate_async.parameter_sync_step"),
                *("sampler.max_off_policy_threshold", "sampler.max_off_policy_strategy"),
            ),
        ),
    )
    for name in names
}
"""Honoured key -> the test that sees its effect, where it is not in test_from_config_keys.py."""

ROOT = HERE.parents[1]
PRODUCT = ("services/trackway/trainer", "services/trackway/learner", "services/trackway/run_config", "deploy")
_ASYNCHRONOUS = "services/trackway/run_config/asynchronous.py"
_MODELS = "services/trackway/run_config/models.py"
_FSDP = ("actor_rollout_ref.actor.fsdp_config", "actor_rollout_ref.ref.fsdp_config", "critic.fsdp")
_BY_NAME = (
    *("trainer.use_v1", "trainer.v1.trainer_mode", "trainer.v1.separate_async.parameter_sync_step"),
    *("trainer.v1.sampler.max_off_policy_threshold", "trainer.v1.sampler.max_off_policy_strategy"),
    *("async_training.require_batches", "rollout.total_rollout_steps", "rollout.test_freq"),
    "actor_rollout_ref.rollout.over_sample_rate",
)
READ_OTHERWISE: dict[str, tuple[str, str]] = {
    "distillation.teacher_models.teacher_model.key": (
        "services/trackway/trainer/loop/teaching.py",
        "teacher.key: Teacher",
    ),
    **{f"{section}.full_determinism": (f"{_LEARNER}/config.py", "section.full_determinism") for section in _FSDP},
    **{key: (_ASYNCHRONOUS, f"'{key}'") for key in _BY_NAME},
    **{
        f"trainer.v1.{mode}.num_warmup_batches": (_ASYNCHRONOUS, "f'trainer.v1.{mode}.num_warmup_batches'")
        for mode in ("colocate_async", "separate_async")
    },
    "reward.reward_manager.name": (_MODELS, "self.reward.reward_manager.name"),
    "trackway.scores_are_independent": (_MODELS, "self.trackway.scores_are_independent"),
}
"""Key -> the file and the code that reads it where `consumers` cannot tell: by its whole name before the models are
built, by a name that is imported, in a loop over sections, or by a validator alone, which refuses other values."""


def kinds(key: str) -> list[str]:
    """How a key is treated."""
    if key in known_keys():
        return ["honoured"]
    if key in MOVED:
        return ["moved"]
    if limited(key):
        return ["of one value"]
    return ["told"] if without_effect(key) else []


def test_every_key_of_verl_is_known_and_explained():
    found = {key: kinds(key) for key in DEFAULTS}

    assert [key for key, kind in found.items() if not kind] == []
    assert all(explain(key)[0].meaning for key in DEFAULTS)
    assert len(DEFAULTS) == 829


def test_each_honoured_key_has_a_test_that_sees_its_effect():
    """test_from_config_keys.py has most: the key, a value, and every field that it changes."""
    honoured = {key for key in DEFAULTS if kinds(key) == ["honoured"]}
    tables = {*KEYS, *(key for keys, _ in (*TOGETHER, *OF_VALUE_MODEL) for key in keys)}

    assert honoured - tables == SEEN_BY.keys()
    tests = {key: test.split("::") for key, test in SEEN_BY.items()}
    modules = {file: (ROOT / file).read_text() for file, _ in tests.values()}
    unseen = [
        key for key, (file, test) in tests.items() if not names_in_test(modules[file], test, key.rpartition(".")[2])
    ]
    assert unseen == []


def test_each_honoured_key_is_read_by_code_of_the_product():
    files = [file for folder in PRODUCT for file in (ROOT / folder).rglob("*.py")]
    reads = set[tuple[str, str]]().union(*(reads_of(file.read_text()) for file in files))

    assert {key for key in known_keys() if not is_read(key, reads)} == READ_OTHERWISE.keys()
    sources = {file: unparsed((ROOT / file).read_text()) for file, _ in READ_OTHERWISE.values()}
    assert [key for key, (file, code) in READ_OTHERWISE.items() if code not in sources[file]] == []


def test_text_and_validators_are_neither_readers_nor_tests_of_a_key():
    said = """
        # rollout.n, settings.seed
        def names(config: RunConfig, settings: DataConfig):
            '''rollout.n and getattr(config.trainer, "logger")'''
            asked, lengths = config.actor_rollout_ref.rollout, settings
            return asked.top_k, lengths.shuffle, settings.val_files, getattr(config.actor_rollout_ref.model, SWITCH)
        SWITCH = "lora_rank"
        class TrainerConfig(Section):
            @model_validator(mode="after")
            def _fits(self):
                return self.nnodes
            @property
            def total(self):
                return self.total_epochs
        """
    reads = reads_of(dedent(said))

    rollout = "actor_rollout_ref.rollout"
    assert [key for key in (f"{rollout}.n", f"{rollout}.top_k", f"{rollout}.top_p") if is_read(key, reads)] == [
        f"{rollout}.top_k"
    ]
    keys = ("data.val_files", "data.seed", "trainer.logger", "trainer.nnodes", "trainer.total_epochs")
    assert [key for key in keys if is_read(key, reads)] == ["data.val_files", "trainer.total_epochs"]
    assert is_read("actor_rollout_ref.model.lora_rank", reads)
    words = ("top_k", "n", "logger", "lora_rank", "nnodes")
    assert [word for word in words if names_in_test(dedent(said), "names", word)] == ["top_k", "lora_rank"]


def test_verls_defaults_are_accepted():
    config = resolve(DEFAULTS)

    told = {key for key, _ in no_effect(config.trackway.ignored_keys)}
    leaves = [key for key, value in DEFAULTS.items() if not isinstance(value, dict)]
    assert [key for key in leaves if kinds(key) == ["told"] and key not in told] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_of_verls_is_planned_with_what_trackway_lacks_listed_and_not_run_with_it(name: str, tmp_path: Path):
    example = EXAMPLES[name]
    words = [*example["arguments"], "--outputs", str(tmp_path / "outputs")]
    lacks: list[str] = example.get("lacks", [])

    told = command(*words, "--dry-run")

    assert told.exit_code == 2, told.exception or told.output
    listed = " ".join(told.stdout.split()).partition("missing here")[2]
    assert [said for said in lacks if listed.count(f"- {said}; ") != 1] == []
    keys = ", ".join(said.partition(":")[0] for said in lacks)
    refuses = "without --dry-run this command refuses to start, because Trackway lacks what these ask for: "
    assert listed.partition(refuses)[2] == keys
    if lacks:
        run = command(*words)
        assert run.exit_code != 0
        assert [part for part in str(run.exception).split("; ") if ": expected" in part] == lacks
        assert not (tmp_path / "outputs").exists()


def command(*words: str) -> Result:
    """Trains with verl's command line on a machine without GPUs."""
    return CliRunner().invoke(app, words, env={"CUDA_VISIBLE_DEVICES": "", "COLUMNS": "200"})
