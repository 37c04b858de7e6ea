"""What the demo's task is learned with: held-out accuracy by setting, over seeds, on one deployment.

    .venv/bin/python benchmarks/learning.py staleness    generation ahead of the learner, with and without correction
    .venv/bin/python benchmarks/learning.py estimators   every `algorithm.adv_estimator`
    .venv/bin/python benchmarks/learning.py losses       every `actor.policy_loss.loss_mode`
    .venv/bin/python benchmarks/learning.py teachers     rewards, a teacher and both, validated after each step
    .venv/bin/python benchmarks/learning.py agents       scripts of examples/agents, as they are, in sessions

`make test-learning` runs estimators and losses. Agents run in an environment of their own, `.venv-openai-agents`, which
is made on the first call, each rollout in a process (agent_server.py).

Each run is the demo's, with the words of its setting; further words (`key=value`) hold for all runs. A run takes about
a minute on two cores. Runs that `--outputs` already holds are not repeated, so that an interrupted command goes on.
The tables are printed after each setting, and written to `--outputs` with every run's accuracies and rewards, of which
`benchmarks/learning_page.py` makes the curves of docs/concepts/algorithms.md.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent))

from checkout import run_in
from environments import environment

from trackway.deploy.bundled import TINY_MODEL
from trackway.deploy.deployment.record import Deployment
from trackway.deploy.local.settings import UpSettings
from trackway.deploy.local.up import bring_up, take_down
from trackway.deploy.runs import demo
from trackway.deploy.runs.demo import HELD_OUT_ROWS, TRAIN_ROWS
from trackway.deploy.runs.prepare import placed
from trackway.deploy.runs.session import RunSession
from trackway.run_config import compose
from trackway.run_config.algorithm import ESTIMATORS as NAMES
from trackway.run_config.policy import LOSSES as LOSS_NAMES
from trackway.system import atomic_write, free_port
from trackway.system.process import UserError
from trackway.trainer.data import make_tiny
from trackway.trainer.run_state.folder import RunFolder
from trackway.wire.errors import TrackwayError
from trackway.wire.trainer import MetricsRow, RunInfo

Settings = Mapping[str, Sequence[str]]
"""Name of a setting -> its words."""

GOAL = 0.8
"""Held-out accuracy that a setting is meant to reach."""
ESTIMATOR = "algorithm.adv_estimator"
LOSS = "actor_rollout_ref.actor.policy_loss.loss_mode"
CLIP = "actor_rollout_ref.actor.clip_ratio"
CORRECTION = "algorithm.rollout_correction"
REWARD = "critic/score/mean"


def _behind(versions: float, correction: str, *words: str) -> list[str]:
    return [f"async_training.staleness_threshold={versions}", f"{CORRECTION}={correction}", *words]


def _clipped(low: float, high: float) -> list[str]:
    return [f"{CLIP}_low={low}", f"{CLIP}_high={high}"]


def _prompts(count: int) -> list[str]:
    """So many prompts in a step, and as many rollouts as in the demo's."""
    sizes = {"data.train_batch_size": count, "actor_rollout_ref.actor.ppo_mini_batch_size": count}
    return [f"{key}={value}" for key, value in (sizes | {"actor_rollout_ref.rollout.n": 96 // count}).items()]


def _loss(mode: str, *words: str) -> list[str]:
    return [f"{LOSS}={mode}", f"{CORRECTION}.bypass_mode=false", *words]


# Four updates from each batch and a publication every eighth step: the sampled weights are far from the trained ones.
_FAR = ("async_training.trigger_parameter_sync_step=8", "actor_rollout_ref.actor.ppo_mini_batch_size=3")
STALENESS: Settings = {
    "in turns": [],
    **{f"S = {versions}, disabled": _behind(versions, "disabled") for versions in (0.3, 1, 4)},
    **{f"S = {versions}, token_is": _behind(versions, "decoupled_token_is") for versions in (0.3, 1, 4)},
    "far, disabled": _behind(4, "disabled", *_FAR),
    "far, token_is": _behind(4, "decoupled_token_is", *_FAR),
}
ESTIMATORS: Settings = {
    **{name: [f"{ESTIMATOR}={name}"] for name in NAMES},
    "dr_grpo": ["algorithm.norm_adv_by_std_in_grpo=false"],
    "gpg": [f"{ESTIMATOR}=gpg", *_loss("gpg")],
    "gdpo": [f"{ESTIMATOR}=gdpo", "algorithm.gdpo_reward_keys=[correct,answered]"],
    "gae": [f"{ESTIMATOR}=gae", "critic.optim.lr=1e-3"],
}
_LOSSES: Settings = {
    **{name: _loss(name) for name in LOSS_NAMES if name != "bypass_mode"},
    "gspo": _loss("gspo", "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean", *_clipped(3e-4, 4e-4)),
    "dro": _loss("dro", "actor_rollout_ref.actor.policy_loss.dro_beta=0.1"),
    "dppo_tv": _loss("dppo_tv", *_clipped(0.15, 0.15)),
    "dppo_kl": _loss("dppo_kl", *_clipped(0.05, 0.05)),
    "bypass_pg_is": [f"{CORRECTION}=bypass_pg_is"],  # loss_mode bypass_mode, loss_type reinforce
}
# Four updates from each batch: in the first one r is 1, where most of these losses have the same gradient.
LOSSES: Settings = {name: [*words, "actor_rollout_ref.actor.ppo_mini_batch_size=3"] for name, words in _LOSSES.items()}
TEACHER = Path("outputs/tiny-teacher")
"""Written by `examples/tiny/build.py --teacher`."""
_OPTIM = "actor_rollout_ref.actor.optim"
_EACH_STEP = ("trainer.test_freq=1",)
_FASTER = (f"{_OPTIM}.lr=1e-3", f"{_OPTIM}.lr_warmup_steps=1", *_EACH_STEP)
_TAUGHT = (
    "distillation.enabled=true",
    f"distillation.teacher_models.teacher_model.model_path={TEACHER.resolve()}",
    "distillation.distillation_loss.loss_mode=forward_kl_topk",
    *_FASTER,
)
TEACHERS: Settings = {
    "rewards": _EACH_STEP,
    "rewards, faster": _FASTER,
    "teacher": [*_TAUGHT, "distillation.distillation_loss.use_task_rewards=false", *_prompts(96)],
    "both": [*_TAUGHT, "distillation.distillation_loss.distillation_loss_coef=0.5", *_prompts(24)],
}
AGENTS: Settings = {"openai_script": [], "openai_agents_sdk": []}
"""By the name of the example."""
PARTS: Mapping[str, Settings] = {
    "staleness": STALENESS,
    "estimators": ESTIMATORS,
    "losses": LOSSES,
    "teachers": TEACHERS,
    "agents": AGENTS,
}


@dataclass(frozen=True)
class Learned:
    """What one run learned."""

    setting: str
    seed: int
    accuracies: dict[int, float]
    """Held out, by step; the first is of step 0."""
    staleness: float
    """Versions by which a trajectory's oldest token is behind the trained weights, mean over the steps."""
    train_reward: float
    """Mean of the last five steps."""
    rewards: dict[int, float]
    """Mean training reward by step."""
    error: str = ""
    """Why the run ended early."""

    @property
    def accuracy(self) -> float:
        """After the last step; 0 for a run that failed."""
        return 0.0 if self.error else self.accuracies[max(self.accuracies)]

    @classmethod
    def of(cls, setting: str, seed: int, rows: Sequence[MetricsRow], error: str = "") -> "Learned":
        """From the metrics of a run."""
        accuracies = {
            row.step: float(value) for row in rows for key, value in row.data.items() if demo.is_accuracy(key)
        }
        rewards = {row.step: float(row.data[REWARD]) for row in rows if REWARD in row.data}
        stale = [
            float(row.data.get("training/off_policy/trajectory_staleness_worst/mean", 0.0)) for row in rows if row.step
        ]
        return cls(
            setting=setting,
            seed=seed,
            accuracies=accuracies,
            staleness=statistics.fmean(stale or [0.0]),
            train_reward=statistics.fmean([*rewards.values()][-5:] or [0.0]),
            rewards=rewards,
            error=error,
        )


def rows_of(part: str, setting: str, seed: int, outputs: Path) -> Path:
    """The folder of the rows, which are made if they are missing."""
    if part != "agents":
        folder = outputs / f"tiny-seed{seed}"
        make_tiny(folder, TRAIN_ROWS, HELD_OUT_ROWS, seed)
        return folder
    folder = outputs / f"tiny-{setting}-seed{seed}"
    make_tiny(folder, TRAIN_ROWS, HELD_OUT_ROWS, seed, agent_name=f"external:{setting}")
    return folder


@contextlib.contextmanager
def agents_of(part: str) -> Iterator[None]:
    """The servers of the examples, named in the settings of a deployment that is started meanwhile."""
    if part != "agents":
        yield
        return
    python = environment("openai-agents", ["openai-agents==0.24.0"])
    server, examples = Path(__file__).with_name("agent_server.py"), Path(__file__).parents[1] / "examples" / "agents"
    ports = {name: free_port() for name in AGENTS}
    agents = {name: {"url": f"http://127.0.0.1:{port}/", "max_running": 32} for name, port in ports.items()}
    os.environ["TRACKWAY_EXTERNAL_AGENTS"] = json.dumps(agents)
    variables = {**os.environ, "OPENAI_AGENTS_DISABLE_TRACING": "1"}
    started = [
        subprocess.Popen(
            [python, server, str(port), examples / f"{name}.py", "openai" if name == "openai_script" else "agents"],
            env=variables,
            stderr=subprocess.DEVNULL,  # the traces of scripts whose session had reached a bound
        )
        for name, port in ports.items()
    ]
    try:
        yield
    finally:
        for process in started:
            process.terminate()
            process.wait()


def words_of(part: str, setting: str, seed: int, args: argparse.Namespace) -> tuple[str, list[str]]:
    """The run's name and its words."""
    data = rows_of(part, setting, seed, args.outputs)
    slug = "".join(letter if letter.isalnum() or letter in "._" else "-" for letter in setting)
    name = f"{part}-{slug}-seed{seed}"
    return name, [
        f"data.train_files={data / 'train.parquet'}",
        f"data.val_files={data / 'test.parquet'}",
        f"actor_rollout_ref.model.path={TINY_MODEL}",
        f"trackway.seed={seed}",
        f"trainer.experiment_name={name}",
        f"trainer.total_training_steps={args.steps}",
        "trainer.save_freq=-1",
        "trackway.trace_prompts_per_step=0",
        "trackway.trace_validation_samples=0",
        *PARTS[part][setting],
        *args.words,
    ]


def finished(outputs: Path, name: str, steps: int) -> list[MetricsRow] | None:
    """The rows of a run that ended with its last step; None when there is none."""
    folder = RunFolder(outputs / name)
    rows = folder.rows() if folder.exists else []
    return rows if rows and rows[-1].step == steps else None


def learn(deployment: Deployment, part: str, setting: str, seed: int, args: argparse.Namespace) -> Learned:
    """One run, unless its folder holds it already."""
    name, words = words_of(part, setting, seed, args)
    rows = finished(args.outputs, name, args.steps)
    if rows is not None:
        return Learned.of(setting, seed, rows)
    folder, number = name, 1
    while RunFolder(args.outputs / folder).exists:  # an earlier attempt
        number += 1
        folder = f"{name}-{number}"
    config = placed(compose(words, config_name="tiny_demo"), deployment)
    error = ""
    try:
        info = RunSession(deployment).follow(RunSession(deployment).start(config, folder).run, progress)
        error = "" if info.step == args.steps else f"ended at step {info.step}"
    except (UserError, TrackwayError) as failure:
        error = str(failure)
    return Learned.of(setting, seed, RunFolder(args.outputs / folder).rows(), error)


def progress(info: RunInfo) -> None:
    """One line that is written over."""
    print(f"\r{info.run}: step {info.step} of {info.total_steps} ", end="", file=sys.stderr, flush=True)


def table(learned: Sequence[Learned]) -> Iterator[str]:
    """Markdown: a row for each setting."""
    seeds = sorted({run.seed for run in learned})
    yield f"| setting | accuracy, seeds {', '.join(map(str, seeds))} | mean | reward at the end | staleness | {GOAL} |"
    yield "|---|---|---|---|---|---|"
    for setting in dict.fromkeys(run.setting for run in learned):
        runs = [run for run in learned if run.setting == setting]
        each = ", ".join("failed" if run.error else f"{run.accuracy:.2f}" for run in runs)
        mean, reward, stale = (
            statistics.fmean(values)
            for values in zip(*((run.accuracy, run.train_reward, run.staleness) for run in runs), strict=True)
        )
        reached = sum(run.accuracy >= GOAL for run in runs)
        yield f"| {setting} | {each} | {mean:.2f} | {reward:.2f} | {stale:.2f} | {reached} of {len(runs)} |"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=list(PARTS))
    parser.add_argument("words", nargs="*", help="configuration of every run: key=value")
    parser.add_argument("--only", nargs="+", metavar="SETTING", help="these settings of the part")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--outputs", type=Path, default=Path("outputs/learning"), help="folder of the runs")
    args = parser.parse_args()
    args.outputs = args.outputs.resolve()
    unknown = set(args.only or []) - set(PARTS[args.part])
    if unknown:
        parser.error(f"--only: expected of {', '.join(PARTS[args.part])}, got {', '.join(sorted(unknown))}")
    run_in(None, parser)
    return args


def main() -> None:
    """Train every setting with every seed, and print the table."""
    args = arguments()
    settings = UpSettings(outputs=args.outputs, port=0, dashboard_port=0, ray_port=0, mlflow_port=0)
    learned: list[Learned] = []
    with agents_of(args.part):
        deployment = bring_up(settings, lambda name, state: None)
        try:
            for setting in args.only or PARTS[args.part]:
                learned += [learn(deployment, args.part, setting, seed, args) for seed in args.seeds]
                text = "\n".join(table(learned))
                print(f"\n{text}", flush=True)
                atomic_write(args.outputs / f"{args.part}.md", text + "\n")
                atomic_write(args.outputs / f"{args.part}.json", json.dumps([asdict(run) for run in learned], indent=1))
        finally:
            take_down(deployment)


if __name__ == "__main__":
    main()
