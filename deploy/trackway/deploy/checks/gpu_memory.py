"""Forecast of the memory that a run needs on each GPU, compared with this machine's GPUs.

The figures come from the model's `config.json` and the settings of the services (trackway.learner.gpu_memory).
"""

from dataclasses import dataclass
from typing import Any

from trackway.deploy.config import serve_config
from trackway.deploy.config.serve_config import SERVERS
from trackway.learner.gpu_memory import (
    EngineMemory,
    LearnerMemory,
    ModelSize,
    doubt,
    forecast_learner,
    gib,
    shortages,
)
from trackway.reward.models import REWARD_MODEL
from trackway.rollout.settings import DEFAULT_MAX_LEN, RolloutSettings
from trackway.run_config import RunConfig


@dataclass(frozen=True)
class GpuMemory:
    """Forecast of a run's GPUs. Engines are those that take memory of a GPU."""

    total: int | None
    """Bytes of the smallest GPU, or None if the GPUs are not on this machine."""
    learner: LearnerMemory
    """One rank, on a GPU that it may share with an engine of the rollout service."""
    engine: EngineMemory | None
    reward_model: EngineMemory | None
    """On a GPU of its own."""

    @property
    def missing(self) -> list[str]:
        """Why the run would fail on these GPUs."""
        if self.total is None:
            return []
        short = shortages(self.learner, self.engine, self.total)
        alone = shortages(None, self.reward_model, self.total)
        return [f"GPU memory: {text}" for text in short] + [f"{REWARD_MODEL}: {text}" for text in alone]

    @property
    def not_sure(self) -> list[str]:
        """Why an update may fail on these GPUs."""
        if self.total is None or self.missing:
            return []
        text = doubt(self.learner, self.engine, self.total)
        return [f"GPU memory: {text}"] if text else []

    @property
    def rows(self) -> list[tuple[str, str]]:
        """Rows of the plan."""
        of = "" if self.total is None else f" of {gib(self.total)}"
        rows = [("GPU memory", f"each rank of the learner{of}: {self.learner.words}")]
        for name, engine in (("rollout engine", self.engine), ("reward model", self.reward_model)):
            if engine is not None:
                rows.append(("", f"{name}: {engine.words(self.total)}"))
        return rows


def gpu_memory(config: RunConfig, services: dict[str, Any], gpus: list[int], download: bool) -> GpuMemory | None:
    """Forecast a run on GPUs of these sizes in bytes, none if unknown. None for a run on CPUs or an unknown model.

    `services` is the Serve config of its services, empty if unknown. `download` fetches the `config.json` of a Hugging
    Face id.
    """
    from trackway.trainer.loop.from_config import learner_config  # it imports torch

    path = config.actor_rollout_ref.model.path
    on_gpus = config.learner_needs_gpus or (config.trackway.device == "auto" and bool(gpus))
    if not on_gpus or path is None:
        return None
    settings = learner_config(config.with_values({"trackway.device": "cuda"}), 0)
    try:
        learner = forecast_learner(settings, config.placement, download=download)
        engine = _engine(serve_config.args_of(services, "rollout"), path, download)
        reward = serve_config.args_of(services, REWARD_MODEL)
        reward_model = _engine(reward, str(reward.get("model_path")), download) if reward else None
    except (OSError, ValueError):  # the check of the model reports them
        return None
    return GpuMemory(min(gpus, default=None), learner, engine, reward_model)


def _engine(args: dict[str, Any], path: str, download: bool) -> EngineMemory | None:
    """Forecast the engine of a rollout service. None for one that uses no GPU of this machine."""
    settings = RolloutSettings(**args)
    server = settings.engine in SERVERS
    if not args or not (server or settings.engine == "torch"):
        return None
    if settings.device == "cpu" or settings.engine_url is not None:
        return None
    return EngineMemory.of(
        ModelSize.read(path, download=download),
        gpus=settings.tensor_parallel_size if server else 1,
        longest=settings.max_model_len or DEFAULT_MAX_LEN,
        share=settings.gpu_memory_utilization if server else None,
        sequences=settings.max_num_seqs,
        sleeps=settings.enable_sleep,
        value_bytes=4 if settings.dtype == "float32" else 2,
    )
