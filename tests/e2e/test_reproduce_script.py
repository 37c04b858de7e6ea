"""The promise: verl's GSM8K script, not one argument changed, trains here; on a CPU with a small model behind it."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.small_runs import small_run
from tests.e2e.test_training import runs
from tests.waiting import until
from tests.weave.weave_process import API_KEY, USER
from trackway.deploy.bundled import TINY_MODEL
from trackway.deploy.deployment.record import Deployment
from trackway.trainer.loop.forecast import forecast
from trackway.trainer.run_state.folder import RunFolder
from trackway.trainer.run_state.trajectories import read_trajectories
from trackway.wire.trainer import RunState

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

SCRIPT = Path(__file__).with_name("reproduce.sh")
CHECKOUT = Path(__file__).parents[2]
PAGE = CHECKOUT / "docs" / "coming-from" / "verl.md"
EXPERIMENT = "qwen2.5-3b_function_rm-gsm8k-sgl-multi-w-tool-verify-n16"
ACCURACY = "val-core/openai/gsm8k/acc/mean@1"
PROBLEMS = [
    (
        "Natalia sold 48 clips in April and half as many in May. How many clips did she sell?",
        "48/2=24. 48+24=72.\n#### 72",
    ),
    ("A pen costs 3 dollars. How much do 4 pens cost?", "3*4=12\n#### 12"),
    ("Tom has 5 apples and eats 2. How many are left?", "5-2=3\n#### 3"),
    ("Bob had 1250 dollars and spent 250. How much is left?", "1250-250=1000\n#### 1,000"),
]
ON_A_CPU = [
    f"actor_rollout_ref.model.path={TINY_MODEL}",
    "data.train_batch_size=2",
    "data.max_prompt_length=960",
    "data.max_response_length=48",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.rollout.n=4",
    "trainer.total_training_steps=2",
]


def environment(home: Path, weave_url: str) -> dict[str, str]:
    """What a user's shell says, with our interpreter first in PATH, no GPU, Weave here and W&B's metrics in files."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    account = {"WANDB_API_KEY": API_KEY, "WANDB_BASE_URL": weave_url, "WANDB_MODE": "offline"}
    own = {"HOME": str(home), "PATH": path, "CUDA_VISIBLE_DEVICES": "", "WF_TRACE_SERVER_URL": weave_url}
    return {**os.environ, **own, **account}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home with GSM8K's rows where the script looks for them."""
    raw = tmp_path / "raw"
    raw.mkdir()
    for split in ("train", "test"):
        lines = [json.dumps({"question": question, "answer": answer}) for question, answer in PROBLEMS]
        (raw / f"{split}.jsonl").write_text("\n".join(lines))
    words = ["data", "gsm8k", "--local-dataset-path", str(raw), "--local-dir", str(tmp_path / "data" / "gsm8k")]
    subprocess.run([sys.executable, "-m", "trackway.deploy.cli", *words], check=True, timeout=120)
    return tmp_path


def ran(user: dict[str, str], *words: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    """A command that must end with the status."""
    done = subprocess.run(words, cwd=CHECKOUT, env=user, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == status, done.stdout[-3000:] + done.stderr[-4000:]
    return done


@pytest.mark.weave
def test_the_script_trains_two_steps_and_leaves_metrics_and_whole_traces(home: Path, weave_url: str) -> None:
    user, outputs = environment(home, weave_url), home / "outputs"
    done = ran(user, "bash", str(SCRIPT), "--outputs", str(outputs), *ON_A_CPU)
    told = [" ".join(line.split()) for line in done.stderr.splitlines()]
    assert "actor_rollout_ref.rollout.name sglang torch, the embedded engine this machine has no GPU" in told
    assert not [line for line in told if line.startswith("trainer.critic_warmup")]  # 0 is what happens here anyway
    assert "trainer.rollout_trace.backend read as actor_rollout_ref.rollout.trace.backend" in told
    assert Deployment.load(outputs) is None  # what was brought up is down again

    folder = RunFolder(outputs / EXPERIMENT)
    info = folder.info()
    assert (info.state, info.step, info.total_steps) == (RunState.FINISHED, 2, 2), info.message
    assert len([*folder.path.glob("wandb/offline-run-*")]) == 1  # the script's second logger
    bound = forecast(folder.config(), rows=4).trace_bytes
    rows = {row.step: row.data for row in folder.rows()}
    assert [*rows] == [0, 1, 2] and ACCURACY in rows[0] and ACCURACY in rows[2] and ACCURACY not in rows[1]
    assert {"actor/kl_loss", "actor/grad_norm", "critic/score/mean", "num_turns/mean"} <= rows[1].keys()

    assert 8 * bound.least <= rows[1]["trace/bytes"] <= 8 * bound.most

    files = {step: read_trajectories(folder.path / "trajectories" / f"step_{step}.parquet") for step in (1, 2)}
    made = [trajectory for file in files.values() for trajectory in file]
    assert [trajectory.error for trajectory in made if trajectory.error] == []
    assert {trajectory.tags.experiment_name for trajectory in made} == {EXPERIMENT}
    # An epoch is two steps of two rows.
    assert sorted({trajectory.tags.sample_index for trajectory in made}) == [0, 1, 2, 3]

    where = ["--backend", "weave", "--project", f"{USER}/gsm8k_async_rl", "--outputs", str(outputs), "--json"]
    checked = json.loads(ran(user, "trackway", "traces", "verify", "--run", EXPERIMENT, *where).stdout)
    assert (checked["trajectories"], checked["complete"]) == (24, 24)
    listed = json.loads(ran(user, "trackway", "traces", "list", "--step", "1", "--train", *where).stdout)
    assert {row["trace_id"] for row in listed} == {trajectory.trace_id for trajectory in files[1]}
    for trajectory in files[1]:
        [row] = [row for row in listed if row["trace_id"] == trajectory.trace_id]
        said = {key: str(value) for key, value in trajectory.tags.model_dump().items()}
        assert {key: row["tags"][key] for key in said} == said


@pytest.mark.weave
def test_the_plan_of_the_script_is_verls(tmp_path: Path, weave_url: str) -> None:
    told = ran(environment(tmp_path, weave_url), "bash", str(SCRIPT), "--dry-run", status=2).stdout
    assert "data.train_files: expected a dataset file at" in told
    assert "256 prompts x 16 = 4096 trajectories" in told
    assert "1 update a step, each of 4096 trajectories in 128 passes of at most 32" in told
    assert "8 GPUs / 2 each = 4" in told
    assert not (CHECKOUT / "outputs" / EXPERIMENT).exists()


@pytest.mark.extended  # the script above goes the same way
def test_the_command_of_the_page_for_verls_users_trains_here(deployment: Deployment, home: Path) -> None:
    [verls, ours] = re.findall(r"^# (?:verl|Trackway)\n((?:.+\n)+?)(?=# |```)", PAGE.read_text(), flags=re.MULTILINE)
    assert ours == verls.replace("python3 -m verl.trainer.main_ppo", "python -m trackway.main_ppo")
    words = [*ON_A_CPU, "trainer.experiment_name=from-verls-page", "--outputs", str(deployment.outputs)]

    ran(environment(home, ""), "bash", "-c", f'{ours.rstrip()} "$@"', "page", *words)

    folder = RunFolder(deployment.outputs / "from-verls-page")
    assert (folder.info().state, [row.step for row in folder.rows()]) == (RunState.FINISHED, [0, 1, 2])
    made = read_trajectories(folder.path / "trajectories" / "step_1.parquet")
    assert [(trajectory.data_source, trajectory.error) for trajectory in made] == [("openai/gsm8k", None)] * 8


def test_on_services_that_run_it_uses_them_and_the_same_command_goes_on_after_ctrl_c(deployment: Deployment) -> None:
    words = small_run(deployment.outputs, "by-main-ppo", 8, "actor_rollout_ref.rollout.name=vllm")
    command = [sys.executable, "-m", "trackway.main_ppo", "--config-name=tiny_demo", *words]
    command += ["--outputs", str(deployment.outputs)]

    first = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    until(lambda: any(listed_run.run == "by-main-ppo" and listed_run.step >= 1 for listed_run in runs(deployment)))
    first.send_signal(signal.SIGINT)
    _, told = first.communicate(timeout=180)
    [stopped] = [listed_run for listed_run in runs(deployment) if listed_run.run == "by-main-ppo"]
    again = subprocess.run([*command, "data.seed=7"], capture_output=True, text=True, timeout=240, check=False)

    assert (first.returncode, stopped.state) == (130, RunState.STOPPED) and 1 <= stopped.step < 8
    seen = [" ".join(line.split()) for line in told.splitlines()]
    assert "actor_rollout_ref.rollout.name vllm as deployed decided by the running deployment" in seen
    assert f"checkpoint saved; to resume: trackway train --resume by-main-ppo --outputs {deployment.outputs}" in seen
    assert "resuming run by-main-ppo with its original data.seed=None" in again.stderr
    assert again.returncode == 0 and "run by-main-ppo finished at step 8" in again.stdout, again.stderr
    assert [row.step for row in RunFolder(deployment.outputs / "by-main-ppo").rows()] == list(range(9))
    assert all(process.find() for process in deployment.processes)  # they are not its own to take down
