"""A learner's weights, without the learner."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

from safetensors.torch import load_file
from torch import Tensor

from trackway.learner.learner import Learner
from trackway.learner.weight_proof import tensor_digests
from trackway.wire.weights import WeightProof


class ModelInMemory:
    """The tensors of a folder, as a learner has those that it publishes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tensors: dict[str, Tensor] = {}
        self.take(folder)

    def take(self, folder: Path) -> None:
        """As after an update."""
        self.folder = folder
        files = map(load_file, sorted(folder.glob("*.safetensors")))
        self.tensors = {name: tensor for file in files for name, tensor in file.items()}

    @contextmanager
    def published(self) -> Iterator[dict[str, Tensor]]:
        """As of a Learner."""
        yield self.tensors

    def export_to_engines(self, folder: Path) -> None:
        """As of a Learner."""
        shutil.copytree(self.folder, folder, dirs_exist_ok=True)

    def proof(self, folder: Path, previous_version: int | None) -> WeightProof:
        """Digests alone."""
        return WeightProof(digests=tensor_digests(folder), dtype="bfloat16")

    def as_learner(self) -> Learner:
        """For those that need nothing else of one."""
        return cast(Learner, self)
