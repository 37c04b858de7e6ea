"""A checkpoint of a run as a Hugging Face folder."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from trackway.learner.weights.peft_folder import WEIGHTS, AdapterConfig, folder_names, layers_of, write_config
from trackway.run_config.policy import ModelConfig
from trackway.system import new_folder, writing
from trackway.trainer.run_state.checkpoint import PREFIX, find_all, find_damage
from trackway.trainer.run_state.folder import RunFolder
from trackway.wire.errors import ErrorCode, TrackwayError

if TYPE_CHECKING:
    from trackway.learner.policy import Policy


class Export(NamedTuple):
    """An exported model."""

    checkpoint: str
    """Folder of the checkpoint."""
    kind: str
    """`model`, or `adapter` for a LoRA adapter without its base model."""
    folder: str
    files: list[str]


def export_checkpoint(run: RunFolder, target: Path, step: int | None = None, *, merge: bool = False) -> Export:
    """Writes the run's newest checkpoint, or the one of a step, to the new folder `target`.

    It gets a model that transformers loads. Of a run with a LoRA adapter the adapter alone, as PEFT writes it, unless
    `merge` asks for the model with the adapter in its weights. Raises TrackwayError for a run without such a
    checkpoint, a damaged one, or an existing folder, and StorageError.
    """
    require_new(target)
    checkpoint = _checkpoint(run, step)
    model = run.config().actor_rollout_ref.model
    kind = "adapter" if model.lora_rank and not merge else "model"
    with writing(target, "the export"), new_folder(target) as draft:
        actor = checkpoint / "actor"
        if kind == "adapter":
            _write_adapter(actor, draft, model)
        elif (actor / "huggingface").is_dir():
            shutil.copytree(actor / "huggingface", draft, symlinks=True, dirs_exist_ok=True)
        else:
            policy_of(actor, model).export(draft)
    return Export(str(checkpoint), kind, str(target), sorted(path.name for path in target.iterdir()))


def require_new(target: Path) -> None:
    """Raise TrackwayError(INVALID_REQUEST) if the target exists, or if it is below a file."""
    if target.exists() or target.is_symlink():
        raise _refused(f"expected a target that does not exist, got {target}; give another one, or remove it")
    above = next(folder for folder in target.absolute().parents if folder.exists())
    if not above.is_dir():
        raise _refused(f"expected a target below a folder, got {target}, where {above} is a file; give another one")


def _write_adapter(actor: Path, folder: Path, model: ModelConfig) -> None:
    # Here and below, since a reader of runs may lack torch.
    from safetensors.torch import save_file

    from trackway.learner.weights.sharded_files import read_whole

    tensors = read_whole(actor / "model")
    save_file(folder_names(tensors), folder / WEIGHTS, metadata={"format": "pt"})
    config = AdapterConfig(
        r=model.lora_rank,
        lora_alpha=model.lora_alpha,
        target_modules=layers_of(tensors),
        base_model_name_or_path=model.path,
    )
    write_config(folder, config)


def policy_of(actor: Path, model: ModelConfig) -> "Policy":
    """The model that the run started from, with a checkpoint's weights. Raises TrackwayError(INVALID_REQUEST)."""
    from trackway.learner.config import LoraSettings, PolicySettings
    from trackway.learner.policy import Policy
    from trackway.learner.ranks.snapshot import FILES
    from trackway.learner.weights.sharded_files import is_saved, read_whole

    extra = actor / FILES["extra"]
    published = read_whole(extra).get("published") if is_saved(extra) else None
    dtype = "float32" if published is None else str(published.dtype).removeprefix("torch.")
    lora, max_positions = LoraSettings.of(model), model.override_config.max_position_embeddings
    try:
        policy = Policy(PolicySettings(model.path or "", dtype, lora=lora, max_positions=max_positions))
        policy.load(actor / FILES["model"])
    except (OSError, ValueError) as error:
        raise _refused(f"expected the model that the run started from, {model.path!r}: {error}") from error
    return policy


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
