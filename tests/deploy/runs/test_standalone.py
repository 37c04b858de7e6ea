"""`python -m trackway.main_ppo` up to where something would start: options, tables, plan."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from trackway.deploy.bundled import CPU_CONFIG, TINY_MODEL
from trackway.deploy.checks.run import Subject, check_run
from trackway.deploy.config import serve_config
from trackway.deploy.config.services_for_run import services_for
from trackway.deploy.local.settings import UpSettings
from trackway.deploy.runs.prepare import prepare, with_models
from trackway.main_ppo import app
from trackway.run_config import compose
from trackway.system.process import UserError
from trackway.trainer.data.row_files import write_rows
from trackway.trainer.run_state.folder import RunFolder
from trackway.trainer.service_urls import ServiceUrls
from trackway.wire.agent import RewardModel, Sample
from trackway.wire.chat import Message
from trackway.wire.errors import TrackwayError
from trackway.wire.trainer import RunState

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[3] / "examples"
CONFIG = EXAMPLES / "sglang_multiturn" / "config"
R = "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model.path=Some/Model"
SHORT = Sample(
    data_source="openai/gsm8k",
    agent_name="tool_agent",
    prompt=[Message(role="user", content="What is 3 plus 4?")],
    reward_model=RewardModel(ground_truth="7"),
)


def main_ppo(*words: str) -> Result:
    result = CliRunner().invoke(app, [*words], env={"CUDA_VISIBLE_DEVICES": ""})
    if isinstance(result.exception, UserError | TrackwayError):
        raise result.exception
    return result


def lines(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines()]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """As many rows as GSM8K has to train on, each short."""
    file = tmp_path / "train.parquet"
    write_rows(file, [SHORT.model_copy(update={"extra_info": {"index": index}}) for index in range(7473)])
    return file


@pytest.fixture
def few_rows(tmp_path: Path) -> list[str]:
    """Overrides for a run of four rows with the tiny model."""
    write_rows(tmp_path / "few.parquet", [SHORT] * 4)
    batch = ["data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=4"]
    return [f"data.train_files={tmp_path / 'few.parquet'}", f"actor_rollout_ref.model.path={TINY_MODEL}", *batch]


def test_the_shipped_configuration_is_what_verl_had() -> None:
    config = compose([], CONFIG, "gsm8k_multiturn_grpo")

    assert (config.data.train_batch_size, config.data.max_prompt_length, config.data.max_response_length) == (
        256,
        1024,
        1024,
    )
    rollout = config.actor_rollout_ref.rollout
    assert (rollout.name, rollout.multi_turn.enable, rollout.multi_turn.max_assistant_turns) == ("sglang", True, 5)
    assert set(config.trackway.ignored_keys) == {"data.return_raw_chat", "actor_rollout_ref.hybrid_engine"}


def test_a_dry_run_prints_the_plan_and_starts_nothing(rows: Path, tmp_path: Path) -> None:
    words = [f"data.train_files={rows}", f"data.val_files={rows}", f"{R}.n=16", f"{R}.tensor_model_parallel_size=2"]
    words += [
        "trainer.n_gpus_per_node=8",
        "trainer.total_epochs=15",
        "trainer.test_freq=20",
        f"{R}.trace.backend=mlflow",
        "actor_rollout_ref.model.path=Some/Model",
    ]
    config = [f"--config-path={CONFIG}", "--config-name=gsm8k_multiturn_grpo"]

    told = main_ppo(*config, *words, "--outputs", str(tmp_path / "outputs"), "--dry-run")

    assert told.exit_code == 0
    plan, _, found = told.stdout.partition("missing here")
    unchecked = found.partition("not checked")[2]
    assert lines(plan)[3:12] == [
        "rows 7473",
        "steps 29 an epoch x 15 = 435",
        "a step 256 prompts x 16 = 4096 trajectories",
        "optimiser 1 update a step, each of 4096 trajectories in 1 pass of at most 4096",
        "rollout engine torch, one replica; with the requested GPUs 8 GPUs / 2 each = 4",
        "overlap none: rollouts and updates take turns",
        "correction none",
        "validation after steps 0, 20, 40, 60, ... 435 (23 in all)",
        "checkpoints after step 435",
    ]
    rest = " ".join(lines(plan)[12:])
    assert "traces 4096 a step to mlflow, each 4 to 16 spans and 2.8 kB to 11.2 kB: 11.5 MB to 45.9 MB a step" in rest
    assert "Some/Model is not in this machine's Hugging Face cache; it is downloaded when the run starts" in unchecked
    assert not (tmp_path / "outputs").exists()


def test_a_plan_says_that_stale_rollouts_are_corrected(few_rows: list[str], tmp_path: Path) -> None:
    words = [*few_rows, "--outputs", str(tmp_path / "outputs"), "--dry-run"]

    ahead = main_ppo("async_training.staleness_threshold=0.5", *words).stdout
    chosen = main_ppo(
        "async_training.staleness_threshold=0.5", "algorithm.rollout_correction=bypass_ppo_clip", *words
    ).stdout

    assert (
        "correction token importance weights, at most 2: set for rollouts of older weights; "
        "algorithm.rollout_correction=disabled sets none"
    ) in lines(ahead)
    assert "correction ppo_clip against the sampler's logprobs" in lines(chosen)


def test_a_plan_counts_the_prompts_that_are_short_enough(tmp_path: Path) -> None:
    long = SHORT.model_copy(update={"prompt": [Message(role="user", content="What is 3 plus 4? " * 200)]})
    write_rows(tmp_path / "train.parquet", [SHORT, long, SHORT])
    words = [f"data.train_files={tmp_path / 'train.parquet'}", "data.filter_overlong_prompts=True"]
    words += ["data.train_batch_size=2", "actor_rollout_ref.actor.ppo_mini_batch_size=2"]

    model = f"actor_rollout_ref.model.path={TINY_MODEL}"
    told = main_ppo(*words, model, "--outputs", str(tmp_path / "outputs"), "--dry-run").stdout
    hub = main_ppo(*words, "actor_rollout_ref.model.path=Some/Model", "--outputs", str(tmp_path), "--dry-run").stdout

    few = ["data.train_max_samples=2", "data.shuffle=false", "data.train_batch_size=1", "--dry-run"]
    few += ["actor_rollout_ref.actor.ppo_mini_batch_size=1", "--outputs", str(tmp_path)]
    bounded = main_ppo(*words, model, *few).stdout

    assert "rows 3, of which 2 have at most 512 tokens" in lines(told)
    assert "rows 2, of which 1 have at most 512 tokens" in lines(bounded)
    assert "the tokenizer of Some/Model cannot be used on this machine" in " ".join(lines(hub))


def test_the_table_says_what_is_set_what_is_decided_here_and_what_does_nothing(tmp_path: Path) -> None:
    words = [
        f"{R}.name=sglang",
        "trainer.balance_batch=True",
        "+trainer.rollout_trace.backend=mlflow",
        "data.train_files='~/x'",
    ]

    told = lines(main_ppo(*words, "--outputs", str(tmp_path), "--dry-run").stderr)

    assert f"data.train_files [{Path('~/x').expanduser()}] []" in told
    assert "actor_rollout_ref.rollout.name sglang torch, the embedded engine this machine has no GPU" in told
    assert "trainer.balance_batch the ranks of a learner always get about as many tokens" in told
    assert "trainer.rollout_trace.backend read as actor_rollout_ref.rollout.trace.backend" in told
    assert "data.train_batch_size 1024" in told  # important, though not given


def test_cfg_job_prints_a_file_that_composes_to_the_same(tmp_path: Path) -> None:
    told = main_ppo(
        f"--config-path={CONFIG}", "--config-name=gsm8k_multiturn_grpo", "data.seed=3", MODEL, "--cfg", "job"
    )
    (tmp_path / "again.yaml").write_text(told.stdout)

    given = compose(["data.seed=3", MODEL], CONFIG, "gsm8k_multiturn_grpo")
    again = compose([], tmp_path / "again.yaml")

    assert yaml.safe_load(told.stdout)["data"]["seed"] == 3
    without_notes = {"trackway": given.trackway.model_copy(update={"ignored_keys": []})}
    assert again == given.model_copy(update=without_notes)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--config-path=nowhere"], "--config: expected a folder or a YAML file, got nowhere"),
        (
            [f"--config-path={CONFIG}", "--config-name=gsm8k"],
            "expected a file gsm8k.yaml in .*, found: gsm8k_multiturn_grpo",
        ),
    ],
)
def test_a_configuration_that_is_not_there_is_told(words: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises((UserError, TrackwayError), match=message):
        main_ppo(*words, "--outputs", str(tmp_path))


@pytest.mark.slow
def test_the_module_runs_from_anywhere_and_refuses_an_unknown_option(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "trackway.main_ppo", "--nope"]

    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)

    assert (ended.returncode, ended.stdout) == (2, "")
    assert "No such option: --nope" in ended.stderr and "Traceback" not in ended.stderr


def test_a_reward_model_that_cannot_score_is_refused_once_its_files_are_here() -> None:
    def services(*words: str) -> dict[str, Any]:
        unread = ["reward.reward_model.enable=true", "reward.reward_model.model_path=me/judge", *words]
        config = services_for(compose(unread), 0, serve_config.load(CPU_CONFIG)).serve_config
        return serve_config.with_options(config, "reward_model", {"model_path": str(TINY_MODEL)})

    asked = services("custom_reward_function.path=/rewards.py")

    assert with_models(asked) == asked
    with pytest.raises(UserError, match=r"got a generative model at .*; name a function"):
        with_models(services())


@pytest.mark.parametrize(
    ("state", "mode", "refused"),
    [(RunState.FINISHED, "auto", True), (RunState.STOPPED, "disable", True), (RunState.STOPPED, "auto", False)],
)
def test_a_name_that_is_taken_is_refused_before_anything_starts(
    few_rows: list[str], tmp_path: Path, state: RunState, mode: str, refused: bool
) -> None:
    def run(*more: str) -> Subject:
        return prepare(
            [*few_rows, "trainer.experiment_name=again", *more], None, "default", UpSettings(outputs=tmp_path)
        )

    def checked(*more: str) -> list[str]:
        return check_run(run(*more), load=False).findings.missing_here

    folder = RunFolder(tmp_path / "again")
    folder.create(run().config, ServiceUrls(agent_url="http://a", tools_url="http://t", weights_url="w"))
    for step in (RunState.RUNNING, *([RunState.STOPPING] if state is RunState.STOPPED else []), state):
        folder.move(step)
    if not refused:
        assert checked() == [] and run("data.seed=7").resumes == "run again with its original data.seed=None"
        return
    [reason] = checked(f"trainer.resume_mode={mode}")
    remedy = "give another trainer.experiment_name or --outputs"
    resume = "set trainer.resume_mode=auto to resume it"
    if state is RunState.FINISHED:
        resume = "a larger trainer.total_training_steps to extend it"
        assert checked("trainer.total_training_steps=9") == []
    assert reason == f"run 'again' is {state} in {tmp_path}; {remedy}, or {resume}"
