"""Inference engines. `protocol` defines what an engine offers; `open_engine` creates the one that the settings name."""

import importlib
from typing import cast

from trackway.rollout.engines.protocol import Engine
from trackway.rollout.settings import RolloutSettings

_ENGINES = {
    "torch": "trackway.rollout.engines.torch.engine:TorchEngine",
    "vllm": "trackway.rollout.engines.remote.vllm:VllmEngine",
    "sglang": "trackway.rollout.engines.remote.sglang:SglangEngine",
    "sim": "trackway.rollout.engines.sim.engine:SimEngine",
}


def open_engine(settings: RolloutSettings) -> Engine:
    """The engine of these settings, not started. Imported lazily, as torch takes seconds."""
    module, name = _ENGINES[settings.engine].split(":")
    return cast(Engine, getattr(importlib.import_module(module), name)(settings))
