"""The words that make a run of the demo a matter of seconds."""

from pathlib import Path

from trackway.deploy.bundled import TINY_MODEL


def small_run(outputs: Path, name: str, steps: int, *overrides: str) -> list[str]:
    """Overrides of the demo's preset that make it a matter of seconds."""
    data = outputs / "data"
    return [
        f"data.train_files={data / 'train.parquet'}",
        f"data.val_files={data / 'test.parquet'}",
        "data.train_batch_size=4",
        "data.val_max_samples=8",
        f"actor_rollout_ref.model.path={TINY_MODEL}",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.rollout.n=4",
        f"trainer.experiment_name={name}",
        f"trainer.project_name={name}",
        f"trainer.total_training_steps={steps}",
        "trackway.trace_prompts_per_step=4",
        "trackway.trace_validation_samples=2",
        *overrides,
    ]
