"""Inference engines. `protocol` defines what an engine offers. `open_engine` creates the one that the settings name."""

from importlib import import_module
from typing import cast

from trackway.rollout.engines.protocol import Engine
from trackway.rollout.settings import RolloutSettings
from trackway.serving.user_code import loading
from trackway.system.process import Experimental, warn_experimental

_ENGINES = {
    "torch": "trackway.rollout.engines.torch.engine:TorchEngine",
    "vllm": "trackway.rollout.engines.remote.vllm:VllmEngine",
    "sglang": "trackway.rollout.engines.remote.sglang:SglangEngine",
}


def open_engine(settings: RolloutSettings) -> Engine:
    """Return the engine of these settings, not started. Imported lazily, as torch takes seconds.

    Raises OwnCodeError when a class of the user's cannot be imported.
    """
    warn_of_experiments(settings)
    module, name = _ENGINES.get(settings.engine, settings.engine).split(":")
    with loading(f"setting engine, {settings.engine!r}"):
        engine = getattr(import_module(module), name)
    return cast(Engine, engine(settings))


def beside(engine: Engine, settings: RolloutSettings) -> RolloutSettings:
    """The settings of another policy's engine, which shares the server that this engine has started."""
    if not settings.engine_shared or settings.engine_url is not None:
        return settings
    from trackway.rollout.engines.remote.engine import RemoteEngine

    assert isinstance(engine, RemoteEngine)
    return settings.model_copy(update={"engine_url": engine.http.base_url})


def lacking_memory(settings: RolloutSettings) -> str:
    """Return why there is too little memory for another policy's engine in this process. Empty if there is enough.

    A server is bounded by its own settings, and what an engine of your own needs is not known.
    """
    if settings.engine != "torch":
        return ""
    from trackway.rollout.engines.torch.weights import free_memory, needed_memory

    kind, free, needed = *free_memory(settings), needed_memory(settings)
    return "" if needed <= free else f"{free / 1e9:.1f} GB of free {kind} for {needed / 1e9:.1f} GB"


def warn_of_experiments(settings: RolloutSettings) -> None:
    """Log what these settings use that never ran."""
    if settings.engine not in _ENGINES or not _on_gpu(settings):
        return
    used = {
        Experimental.GPU: True,
        Experimental.SEVERAL_GPUS: settings.tensor_parallel_size > 1,
        Experimental.SLEEP: settings.enable_sleep,
        Experimental.IPC: settings.weights_transport == "ipc",
    }
    for feature in (feature for feature, is_used in used.items() if is_used):
        warn_experimental(feature)


def _on_gpu(settings: RolloutSettings) -> bool:
    """Return whether the model is on a GPU, which the servers need with `auto`."""
    if settings.device != "auto" or settings.engine != "torch":
        return settings.device != "cpu"
    import torch

    return torch.cuda.is_available()
