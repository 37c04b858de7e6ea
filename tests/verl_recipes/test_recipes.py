"""verl's own configuration and example scripts: every key is known, and what is not run is refused with its reason."""

from pathlib import Path

import pytest
import yaml
from pydantic import JsonValue
from typer.testing import CliRunner

from tests.services.trainer.loop.test_from_config_keys import KEYS, OF_VALUE_MODEL, TOGETHER
from trackway.deploy.commands.main_ppo import app
from trackway.trainer.config import explain, no_effect, resolve
from trackway.trainer.config.compose import known_keys
from trackway.trainer.config.unsupported_keys import MOVED, limited, without_effect

HERE = Path(__file__).parent
DEFAULTS: dict[str, JsonValue] = yaml.safe_load((HERE / "ppo_trainer.yaml").read_text())
"""Every key of verl 0.9.1 with its default."""
EXAMPLES: dict[str, dict] = yaml.safe_load((HERE / "examples.yaml").read_text())
"""The arguments of verl's example scripts."""


_TESTS = "tests/services/trainer"
SEEN_BY: dict[str, str] = {
    f"{section}{name}": file
    for section, file, names in (
        (
            "actor_rollout_ref.rollout.",
            "tests/deploy/config/test_services_for_run.py",
            (
                *("name", "dtype", "gpu_memory_utilization", "enforce_eager", "tensor_model_parallel_size"),
                *("max_model_len", "max_num_seqs", "enable_prefix_caching", "engine_kwargs.vllm"),
                *("engine_kwargs.sglang", "multi_turn.tool_config_path"),
            ),
        ),
        (
            "actor_rollout_ref.rollout.",
            "tests/deploy/runs/test_project.py",
            ("multi_turn.function_tool_path", "multi_turn.format", "agent.agent_loop_config_path"),
        ),
        ("actor_rollout_ref.rollout.", f"{_TESTS}/config/test_compose.py", ("mode",)),
        ("data.", "tests/deploy/config/test_services_for_run.py", ("apply_chat_template_kwargs",)),
        ("data.", f"{_TESTS}/data/test_dataset.py", ("train_files", "shuffle", "train_max_samples", "val_max_samples")),
        ("data.", f"{_TESTS}/loop/test_forecast.py", ("val_files",)),
        ("data.", f"{_TESTS}/data/test_dataset.py", ("seed",)),
        ("data.", f"{_TESTS}/data/test_prompt_filter.py", ("filter_overlong_prompts",)),
        ("reward.reward_manager.", f"{_TESTS}/config/test_compose.py", ("name",)),
        ("custom_reward_function.", "tests/services/reward/test_functions.py", ("path", "name")),
        ("trainer.", f"{_TESTS}/tracking/test_loggers.py", ("logger",)),
        ("trainer.", f"{_TESTS}/loop/test_build.py", ("rollout_data_dir", "validation_data_dir")),
        ("trainer.", f"{_TESTS}/loop/test_resume.py", ("resume_mode", "resume_from_path")),
        ("trainer.", f"{_TESTS}/run_state/test_folder.py", ("default_local_dir",)),
        ("trainer.", f"{_TESTS}/config/test_asynchronous.py", ("use_v1",)),
        (
            "trainer.v1.",
            f"{_TESTS}/config/test_asynchronous.py",
            (
                *("trainer_mode", "colocate_async.num_warmup_batches", "separate_async.num_warmup_batches"),
                *("separate_async.parameter_sync_step", "sampler.max_off_policy_threshold"),
                "sampler.max_off_policy_strategy",
            ),
        ),
    )
    for name in names
}
"""Honoured key -> the file whose tests see its effect, where it is not in test_from_config_keys.py."""


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
    texts = {file: (HERE.parents[1] / file).read_text() for file in SEEN_BY.values()}
    assert [key for key, file in SEEN_BY.items() if key.rpartition(".")[2] not in texts[file]] == []


def test_verls_defaults_are_accepted():
    config = resolve(DEFAULTS)

    told = {key for key, _ in no_effect(config.trackway.ignored_keys)}
    leaves = [key for key, value in DEFAULTS.items() if not isinstance(value, dict)]
    assert [key for key in leaves if kinds(key) == ["told"] and key not in told] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_of_verls_is_planned_or_refused_with_its_reason(name: str, tmp_path: Path):
    words = [*EXAMPLES[name]["arguments"], "--outputs", str(tmp_path / "outputs"), "--dry-run"]

    told = CliRunner().invoke(app, words, env={"CUDA_VISIBLE_DEVICES": ""})

    refused = EXAMPLES[name].get("refused")
    if refused is None:
        assert told.exit_code == 0, told.exception or told.output
        assert "missing here" in told.output
    else:
        assert told.exit_code != 0
        assert refused in str(told.exception or told.output)
