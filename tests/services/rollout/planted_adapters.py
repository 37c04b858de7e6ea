"""Two versions of an adapter that a learner really made, and folders of wrong ones in place of the second."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.services.rollout.planted_weights import DEMO, Pairs, batch
from tests.services.trainer.learner_settings import learner_config
from trackway.learner.learner import Learner
from trackway.wire.weights import WeightProof

RANK, ALPHA = 4, 12
FILE = "adapter_model.safetensors"
Tensors = dict[str, Tensor]


class AdapterVersions(NamedTuple):
    """Version 2 of a run, what was published with it, and folders of what an engine may hold in its place."""

    before: WeightProof
    """The proof of version 1, in the folder "old kept"."""
    proof: WeightProof
    folders: dict[str, Path]
    whole: dict[str, Path]
    """By version: the whole model with the adapter merged into it."""


def changed(folder: Path, into: Path, change: Callable[[Tensors], Tensors]) -> Path:
    """A copy of an adapter with other tensors."""
    shutil.copytree(folder, into)
    save_file(change(load_file(folder / FILE)), into / FILE)
    return into


def scaled(tensors: Tensors, scale: float = ALPHA / RANK) -> Tensors:
    """With alpha / rank in B already, so that an engine that scales it does so twice."""
    return {name: tensor * scale if ".lora_B." in name else tensor for name, tensor in tensors.items()}


def other_prefix(tensors: Tensors) -> Tensors:
    """With names that no layer of the model has, as of a model that holds this one as a part."""
    return {name.replace("base_model.model.model.", "base_model.model.lm.model."): t for name, t in tensors.items()}


def make_adapters(model: Path, pairs: Pairs, root: Path, dtype: str = "float32") -> AdapterVersions:
    """Of a run that begins at the model and trains a LoRA adapter on these pairs."""
    lora = {"lora_rank": RANK, "lora_alpha": ALPHA, "lr": 10 * DEMO}
    run = Learner(learner_config(model, dtype=dtype, bypass_mode=False, **lora))
    proofs: list[WeightProof] = []
    for version in ("1", "2"):
        run.update(batch(pairs, good=1))
        run.export_to_engines(root / version)
        run.export(root / f"whole-{version}")
        proofs.append(run.proof(root / version, len(proofs) or None))
    folders = {
        "right": root / "2",
        "old kept": root / "1",
        "scaled twice": changed(root / "2", root / "scaled", scaled),
        "other prefix": changed(root / "2", root / "prefix", other_prefix),
    }
    before, proof = proofs
    return AdapterVersions(before, proof, folders, {version: root / f"whole-{version}" for version in ("1", "2")})


def with_config(folder: Path, into: Path, **values: object) -> Path:
    """A copy of an adapter with other values in its configuration."""
    shutil.copytree(folder, into)
    config = json.loads((folder / "adapter_config.json").read_text())
    (into / "adapter_config.json").write_text(json.dumps({**config, **values}))
    return into
