"""The table of docs/guides/gpu-memory.md: verl's example scripts on machines of 1, 2 and 8 GPUs.

`python -m tests.verl_recipes.gpu_table` writes it again.
"""

import json
import tempfile
from dataclasses import replace
from pathlib import Path

import yaml

from trackway.deploy.bundled import CPU_CONFIG
from trackway.deploy.checks.gpu_memory import gpu_memory
from trackway.deploy.config import serve_config
from trackway.deploy.config.services_for_run import services_for
from trackway.run_config import compose

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs/guides/gpu-memory.md"
BEGIN, END = "<!-- begin of the table -->\n", "<!-- end of the table -->\n"
EXAMPLES: dict[str, dict] = yaml.safe_load((HERE / "examples.yaml").read_text())
MODELS: dict[str, dict] = yaml.safe_load((HERE / "models.yaml").read_text())
ALIASES = {
    "Qwen/Qwen3-30B-A3B-Base": "Qwen/Qwen3-30B-A3B",
    **{f"Qwen/Qwen2.5-{name}": "Qwen/Qwen2.5-7B" for name in ("7B-Instruct", "Math-7B")},
    "/home/user/verl/models/Qwen2.5-Math-7B": "Qwen/Qwen2.5-7B",
    "/home/user/verl/models/Qwen2.5-32B": "Qwen/Qwen2.5-32B",
    "/home/user/verl/models/FAPO-GenRM-4B": "Qwen/Qwen3-4B",
    "/YOUR_MODELPATH": "Qwen/Qwen2.5-7B",
}
"""Models of the same shape. The scripts `7b_clip_cov.sh` and `7b_kl_cov.sh` name none."""
COUNTS, SIZES = (1, 2, 8), (24, 80, 141)
MODEL, REWARD_MODEL = "actor_rollout_ref.model.path", "reward.reward_model.model_path"
GPUS, TP = "trainer.n_gpus_per_node", "actor_rollout_ref.rollout.tensor_model_parallel_size"


def folders(root: Path) -> dict[str, str]:
    """A folder with the `config.json` of each model."""
    for name, model in MODELS.items():
        (root / name).mkdir(parents=True)
        (root / name / "config.json").write_text(json.dumps(model["config"]))
    return {name: str(root / ALIASES.get(name, name)) for name in (*MODELS, *ALIASES)}


def cell(arguments: list[str], count: int, paths: dict[str, str]) -> str:
    """Forecast a script on `count` GPUs: the peak of a rank in GiB, and the GPU sizes in GB that hold it."""
    config = compose(arguments, None, "ppo_trainer", [])
    reward = config.reward.reward_model
    given = count - (reward.rollout.tensor_model_parallel_size or 1 if reward.enable else 0)
    if given < 1:
        return ""
    parallel = min(config.actor_rollout_ref.rollout.tensor_model_parallel_size or 1, given)
    own = {MODEL: paths[str(config.actor_rollout_ref.model.path)], GPUS: given, TP: parallel, "trainer.nnodes": 1}
    if reward.enable:
        own |= {REWARD_MODEL: paths[str(reward.model_path)]}
    if config.critic.model.path is not None:
        own |= {"critic.model.path": own[MODEL]}
    services = services_for(config.with_values(own), count, serve_config.load(CPU_CONFIG))
    plan = gpu_memory(services.config, services.serve_config, [SIZES[0] * 10**9] * count, download=False)
    assert plan is not None
    plans = {size: replace(plan, total=size * 10**9) for size in SIZES}
    fits = [str(size) for size, plan in plans.items() if not plan.missing and not plan.not_sure]
    return f"{plan.learner.peak / 2**30:.0f}: {', '.join(fits) or 'none'}"


def table() -> str:
    """Return the whole table; scripts with equal forecasts share a row."""
    head = ["scripts", *(f"{count} GPU{'s' * (count > 1)}" for count in COUNTS)]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    scripts: dict[tuple[str, ...], list[str]] = {}
    with tempfile.TemporaryDirectory() as root:
        paths = folders(Path(root))
        for name, example in EXAMPLES.items():
            cells = tuple(cell(example["arguments"], count, paths) for count in COUNTS)
            scripts.setdefault(cells, []).append(f"`{name.removeprefix('examples/')}`")
    lines += [f"| {', '.join(names)} | {' | '.join(cells)} |" for cells, names in scripts.items()]
    return "\n".join(lines) + "\n"


def with_table(page: str, rows: str) -> str:
    """The page with this table."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n{rows}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(), table()))
