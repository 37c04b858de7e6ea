"""Expected digests of an inference server's parameters, by rank, from a folder of published weights.

vLLM's digests are sha256, so values are compared. It may fuse, pad, shard or quantise tensors: the digests of the base
weights, which it loads itself, show which parameters have a known form on every rank. Only these are compared later.
SGLang hashes on the GPU by a function of its own, so only changes are compared: a parameter is old if its published
values changed and its digests did not. The server's logprobs decide what digests cannot.
"""

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from safetensors import safe_open
from torch import Tensor

from trackway.rollout.engines.weight_folder import EMBEDDING, HEAD, tensors
from trackway.rollout.engines.weight_proof import HeldDigests, compare_digests

_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_RANK = re.compile(r"^(?:[a-z]+\d+:)*tp(\d+):")  # vLLM: dp0:pp0:pcp0:tp0:
_ADAPTED = ".base_layer."
"""In servers' names of layers that may have an adapter."""
_VOCABULARY_BLOCK = 64
"""Servers pad the vocabulary with rows of zeros to a multiple of this."""
_THREADS = min(8, os.cpu_count() or 1)

Checksums = Mapping[str, str]
"""Digest by parameter, whose name begins with its rank, as in `dp0:pp0:pcp0:tp0:model.norm.weight`."""
T = TypeVar("T")


class _Shard(NamedTuple):
    """A parameter's share on one rank."""

    key: str
    """In `Checksums`."""
    rank: int
    """In its group for tensor parallelism."""


class DigestValues:
    """Compares sha256 digests of all ranks, for the parameters whose form is known on each of them."""

    def __init__(self, base: Path, dtype: str, held: Checksums) -> None:
        self._dtype = getattr(torch, dtype)
        self._shards = _shards(held)
        self._ranks = 1 + max((shard.rank for shards in self._shards.values() for shard in shards), default=0)

        def learned(name: str, parts: list[Tensor]) -> list[int | None]:
            return [self._form_of(parts, shard.rank, held[shard.key]) for shard in self._shards[name]]

        forms = _mapped(base, list(self._shards), self._dtype, learned)
        self.forms = {
            name: [form for form in found if form is not None] for name, found in forms.items() if None not in found
        }
        """For each parameter the index in `_forms` of the form in which each rank holds it."""

    def compare(self, folder: Path, held: Checksums, before: Path) -> HeldDigests:
        """Classify the folder's tensors after its load. `before` is the folder of the previous weights."""
        published = dict.fromkeys(tensors(folder), "not compared")
        by_tensor = _by_tensor(
            {name: " ".join(held.get(shard.key, "") for shard in self._shards[name]) for name in self.forms}
        )
        tied = published.keys() - by_tensor.keys() == {HEAD} and self._is_tied(folder)
        by_tensor, wanted = _with_head(by_tensor, tied), _with_head(self._wanted(folder), tied)
        result = compare_digests(by_tensor, published | wanted)
        if result.other and before.is_dir():
            result = compare_digests(by_tensor, published | wanted, _with_head(self._wanted(before), tied))
        return result

    def _is_tied(self, folder: Path) -> bool:
        embedding = _embedding(tensors(folder))
        names = [HEAD, embedding] if embedding else []
        digests = _mapped(folder, names, self._dtype, lambda _, parts: _sha256(parts))
        return bool(digests) and digests[HEAD] == digests[embedding]

    def _wanted(self, folder: Path) -> dict[str, str]:
        """The digests of all ranks by tensor. Tensors that the folder lacks are absent."""

        def digests(name: str, parts: list[Tensor]) -> str:
            shards = zip(self._shards[name], self.forms[name], strict=True)
            return " ".join(
                _sha256(next(islice(_forms(parts, shard.rank, self._ranks), form, None))) for shard, form in shards
            )

        return _by_tensor(_mapped(folder, list(self.forms), self._dtype, digests))

    def _form_of(self, parts: list[Tensor], rank: int, digest: str) -> int | None:
        forms = enumerate(_forms(parts, rank, self._ranks))
        return next((index for index, form in forms if _sha256(form) == digest), None)


class DigestChanges:
    """Finds parameters with new published values whose digests did not change on any rank.

    The server must hold parameters in `dtype`: quantisation may hide a change.
    """

    def __init__(self, base: Path, dtype: str, held: Checksums) -> None:
        self._dtype = getattr(torch, dtype)
        self._held: dict[Path, Checksums] = {base: held}
        """The server's digests after the last two folders."""

    def compare(self, folder: Path, held: Checksums, before: Path) -> HeldDigests:
        """Find old tensors after the folder's load. None if `before` was never compared, or is gone."""
        known = self._held.get(before)
        if known is None or not before.is_dir():
            self._held = {folder: held}
            return HeldDigests()
        self._held = {before: known, folder: held}
        shards = _shards(held)
        still = [name for name in shards if all(held[key] == known.get(key) for key, _ in shards[name])]
        new, old = (self._published(path, still) for path in (folder, before))
        changed = [name for name, digest in new.items() if name in old and digest != old[name]]
        return HeldDigests(old=changed, moved=len(shards) - len(still))

    def _published(self, folder: Path, names: list[str]) -> dict[str, str]:
        """The digest of each tensor of these parameters."""
        digests = _mapped(folder, names, self._dtype, lambda _, parts: [_sha256([part]) for part in parts])
        return {
            part: digest for name, found in digests.items() for part, digest in zip(parts_of(name), found, strict=True)
        }


ServerDigests = DigestValues | DigestChanges


def parts_of(parameter: str) -> list[str]:
    """The published tensors that a server concatenates in this parameter. Itself if it is not fused."""
    module, _, kind = parameter.rpartition(".")
    owner, _, leaf = module.rpartition(".")
    return [f"{owner}.{part}.{kind}" for part in _FUSED[leaf]] if leaf in _FUSED else [parameter]


def _shards(checksums: Checksums) -> dict[str, list[_Shard]]:
    """Return the shares of all ranks by the parameter's name without the rank."""
    shards: dict[str, list[_Shard]] = {}
    for key in sorted(checksums):
        found = _RANK.match(key)
        name = key[found.end() if found else 0 :].replace(_ADAPTED, ".")
        shards.setdefault(name, []).append(_Shard(key, int(found[1]) if found else 0))
    return shards


def _by_tensor(digests: Mapping[str, str]) -> dict[str, str]:
    return {part: digest for name, digest in digests.items() for part in parts_of(name)}


def _embedding(names: Iterable[str]) -> str:
    return next((name for name in names if name.endswith(EMBEDDING)), "")


def _with_head(digests: dict[str, str], tied: bool) -> dict[str, str]:
    """Tied weights share one parameter on a server; kernels that repack the head also repack other layers."""
    embedding = _embedding(digests)
    return {**digests, HEAD: digests[embedding]} if tied and embedding else digests


def _mapped(
    folder: Path, names: list[str], dtype: torch.dtype, function: Callable[[str, list[Tensor]], T]
) -> dict[str, T]:
    """`function` of each parameter's name and published tensors. Parameters that the folder lacks are absent."""
    places = tensors(folder)
    embedding = _embedding(places)
    if HEAD not in places and embedding:  # it is tied
        places[HEAD] = places[embedding]
    with ExitStack() as stack:
        files = {place.file for place in places.values()}
        opened = {file: stack.enter_context(safe_open(file, framework="pt")) for file in files}

        def applied(name: str) -> T:
            parts = [places[part] for part in parts_of(name)]
            return function(name, [opened[part.file].get_tensor(part.name).to(dtype) for part in parts])

        known = [name for name in names if all(part in places and places[part].shape for part in parts_of(name))]
        with ThreadPoolExecutor(_THREADS) as pool:
            return dict(zip(known, pool.map(applied, known), strict=True))


def _forms(parts: list[Tensor], rank: int, ranks: int) -> Iterator[list[Tensor]]:
    """The published tensors of a parameter in each form in which one of several ranks may hold them.

    These are: its rows of each, also of fewer parts for keys and values with fewer heads than ranks; its rows of a
    padded vocabulary; all of it; its columns.
    """
    first, *others = parts
    for shares in (count for count in range(ranks, 0, -1) if ranks % count == 0):
        own = first.tensor_split(ranks)[rank]
        yield [own, *(part.tensor_split(shares)[rank * shares // ranks] for part in others)]
    padded = -(-len(first) // _VOCABULARY_BLOCK) * _VOCABULARY_BLOCK // ranks
    shown = first[rank * padded : (rank + 1) * padded]
    yield [shown, first.new_zeros(padded - len(shown), *first.shape[1:])]
    yield parts
    if first.ndim > 1:
        yield [part.tensor_split(ranks, 1)[rank] for part in parts]


def _sha256(parts: list[Tensor]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()
