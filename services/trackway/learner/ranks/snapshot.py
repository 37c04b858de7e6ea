"""Contents of a learner's checkpoint: written at once, or copied first and written while training goes on.

Each rank copies and writes its own shards. The other ranks than the first write in a thread, which the first one tells
when: a write that the disk refuses is repeated from the same copy.
"""

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from threading import Lock, Thread
from typing import Self, cast

from pydantic import TypeAdapter
from torch import Tensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from trackway.learner.ranks.messages import broadcast
from trackway.learner.ranks.sharding import Ranks
from trackway.learner.weights.sharded_files import is_saved, write_shards
from trackway.run_config.policy import CheckpointContents

Tensors = Mapping[str, Mapping[str, Tensor]]
"""Tensors by the name of their file. A name with a folder lies beside the policy's folder."""
Publish = Callable[[Path], None]
"""Writes a Hugging Face folder, in the first rank."""

FILES = {"model": "model", "optimizer": "optim", "extra": "extra_state"}
"""Names of the files by what they hold, in the words of `checkpoint.save_contents`."""
_FOLDER = TypeAdapter(Path | None)
_FOLLOWING = Lock()
"""Held by the thread that the first rank commands, so that the commands of two snapshots do not mix."""

logger = logging.getLogger("trackway.trainer")


def to_load(folder: Path, contents: CheckpointContents) -> frozenset[str]:
    """Parts that are restored from a checkpoint's folder. Raises ValueError if one besides the model is not there."""
    lacking = [part for part in FILES if part in contents.loaded and not is_saved(folder / FILES[part])]
    if lacking and lacking[0] != "model":
        raise ValueError(
            f"expected {' and '.join(lacking)} in {folder}, got none: it was saved without "
            "(checkpoint.save_contents); leave it out of checkpoint.load_contents"
        )
    return contents.loaded


def place(folder: Path, name: str) -> Path:
    """The files of some tensors of a checkpoint, without their suffix."""
    return (folder.parent if "/" in name else folder) / name


def write_state(folder: Path, tensors: Tensors, ranks: Ranks, publish: Publish | None = None) -> None:
    """Writes a checkpoint's tensors, and the model as a Hugging Face folder `huggingface`. A collective."""
    for name, of in tensors.items():
        write_shards(place(folder, name), of, ranks.writers)
    if publish is not None and ranks.is_first:
        publish(folder / "huggingface")


@dataclass(frozen=True)
class Snapshot:
    """A copy in main memory of what this rank holds of a learner, which training does not change."""

    tensors: Tensors
    publish: Publish | None
    ranks: Ranks
    naming: Callable[[], AbstractContextManager[None]] = nullcontext
    """A context whose errors name a rank that is lost."""

    @classmethod
    def of(cls, tensors: Tensors, publish: Publish | None, ranks: Ranks) -> Self:
        """Copies the tensors. In other ranks than the first a thread then waits to write them."""
        stager = DefaultStager(StagingOptions(False, False, False, False))
        copied = cast(Tensors, stager.stage({name: dict(of) for name, of in tensors.items()}))
        snapshot = cls(copied, publish, ranks)
        stager.close()
        if not ranks.is_first:
            Thread(target=snapshot._follow, name="checkpoint", daemon=True).start()
        return snapshot

    def write(self, folder: Path) -> None:
        """Writes the files of all ranks; by the first one. Raises OSError, after which it may be called again."""
        with self.naming():
            self._announce(folder)
            write_state(folder, self.tensors, self.ranks, self.publish)

    def close(self) -> None:
        """Lets the other ranks free their copies."""
        try:
            self._announce(None)
        except RuntimeError:  # the group is broken, which the learner's next command reports
            logger.warning("the other ranks were not told that a checkpoint is written", exc_info=True)

    def _announce(self, folder: Path | None) -> None:
        if self.ranks.writers is not None:
            broadcast(_FOLDER, folder, self.ranks.writers)

    def _follow(self) -> None:
        with _FOLLOWING:
            self._obey()

    def _obey(self) -> None:
        while True:
            try:
                folder = broadcast(_FOLDER, group=self.ranks.writers)
            except RuntimeError:
                logger.exception("rank %d: the first rank no longer writes a checkpoint", self.ranks.index)
                return
            if folder is None:
                return
            try:
                write_state(folder, self.tensors, self.ranks)
            except Exception:  # the first rank has it too; a group that is broken fails above
                logger.warning("the share of rank %d of a checkpoint is not written", self.ranks.index, exc_info=True)
