"""A checkpoint of a run as a Hugging Face folder."""

import shutil
from pathlib import Path
from typing import NamedTuple

from trackway.system import new_folder, writing
from trackway.trainer.learner.weights.peft_folder import (
    WEIGHTS,
    AdapterConfig,
    folder_names,
    layers_of,
    write_config,
)
from trackway.trainer.run_state.checkpoint import PREFIX, find_all, find_damage
from trackway.trainer.run_state.folder import RunFolder
from trackway.wire.errors import ErrorCode, TrackwayError


class Export(NamedTuple):
    """What was exported."""

    checkpoint: str
    """Folder of the checkpoint."""
    kind: str
    """`model`, or `adapter` for a LoRA adapter without its base model."""
    folder: str
    files: list[str]


def export_checkpoint(run: RunFolder, target: Path, step: int | None = None, *, merge: bool = False) -> Export:
    """Writes the run's newest checkpoint, or that of a step, to the new folder `target`.

    It gets a model that transformers loads; of a run with a LoRA adapter the adapter alone, as PEFT writes it, unless
    `merge` asks for the model with the adapter in its weights. Raises TrackwayError for a run without such a
    checkpoint, a damaged one, or an existing folder, and StorageError.
    """
    if target.exists():
        raise _refused(f"expected a folder that does not exist, got {target}; give another one, or remove it")
    checkpoint = _checkpoint(run, step)
    model = run.config().actor_rollout_ref.model
    kind = "adapter" if model.lora_rank and not merge else "model"
    with writing(target, "the export"), new_folder(target) as draft:
        if kind == "model":
            shutil.copytree(checkpoint / "actor" / "huggingface", draft, dirs_exist_ok=True)
        else:
            _write_adapter(checkpoint / "actor", draft, model.path, model.lora_rank, model.lora_alpha)
    return Export(str(checkpoint), kind, str(target), sorted(path.name for path in target.iterdir()))


def _write_adapter(actor: Path, folder: Path, base: str | None, rank: int, alpha: float) -> None:
    from safetensors.numpy import load_file, save_file  # a reader of runs may lack numpy

    tensors = load_file(actor / "model.safetensors")
    save_file(folder_names(tensors), folder / WEIGHTS, metadata={"format": "pt"})
    layers = layers_of(tensors)
    write_config(folder, AdapterConfig(r=rank, lora_alpha=alpha, target_modules=layers, base_model_name_or_path=base))


def _checkpoint(run: RunFolder, step: int | None) -> Path:
    complete = find_all(run.checkpoints)
    chosen = next((path for path in complete if step is None or path.name == f"{PREFIX}{step}"), None)
    if chosen is None:
        steps = ", ".join(sorted((path.name.removeprefix(PREFIX) for path in complete), key=int)) or "none"
        wanted = "a checkpoint" if step is None else f"a checkpoint of step {step}"
        raise _refused(f"expected {wanted} of {run.name}, got {steps}; set trainer.save_freq, or give another --step")
    damage = find_damage(chosen)
    if damage is not None:
        raise TrackwayError(
            ErrorCode.CHECKPOINT_CORRUPT,
            f"the checkpoint {chosen} is damaged: {damage}; export another one with --step",
            path=str(chosen),
            damage=damage,
        )
    return chosen


def _refused(reason: str) -> TrackwayError:
    return TrackwayError(ErrorCode.INVALID_REQUEST, reason)
