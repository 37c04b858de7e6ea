"""What an inference server's parameters must hash to, computed from a folder of published weights.

A server fuses, pads, shards or quantises tensors in its own way. So it is asked once about the base weights, which it
loaded by itself: only parameters whose digest is understood there are compared later, and all others are left to its
answers.
"""

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from trackway.rollout.engines.weight_folder import EMBEDDING, HEAD, tensors
from trackway.rollout.engines.weight_proof import HeldDigests, compare_digests

_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_RANK = re.compile(r"^(?:[a-z]+\d+:)+")  # vLLM: dp0:pp0:pcp0:tp0:
_VOCABULARY_BLOCK = 64
"""vLLM fills the vocabulary up to a multiple of this with rows of zeros."""
_THREADS = min(8, os.cpu_count() or 1)

Parameters = Mapping[str, str]
"""Digest by name of a server's parameter, without its rank."""


def by_parameter(checksums: Mapping[str, str]) -> dict[str, str]:
    """A server's answer without ranks; empty when several ranks hold parts of a parameter."""
    named = {_RANK.sub("", name): digest for name, digest in checksums.items()}
    return named if len(named) == len(checksums) else {}


class ServerDigests:
    """Which of a server's parameters can be compared, and how they compare with a folder's tensors."""

    def __init__(self, base: Path, dtype: str, held: Parameters) -> None:
        self._dtype = getattr(torch, dtype)
        understood = self._digests(base, list(held))
        self.parameters = {name: forms.index(held[name]) for name, forms in understood.items() if held[name] in forms}
        """By name: which of the forms of `_forms` the server holds it in."""

    def compare(self, folder: Path, held: Parameters, before: Path) -> HeldDigests:
        """The folder's tensors as the server holds them; `before` is the folder of the weights that it held before."""
        published = dict.fromkeys(tensors(folder), "not compared")
        told = self._by_tensor({name: digest for name, digest in held.items() if name in self.parameters})
        tied = published.keys() - told.keys() == {HEAD} and self._is_tied(folder)
        told, wanted = _with_head(told, tied), _with_head(self._wanted(folder), tied)
        result = compare_digests(told, published | wanted)
        if result.other and before.is_dir():
            result = compare_digests(told, published | wanted, _with_head(self._wanted(before), tied))
        return result

    def _is_tied(self, folder: Path) -> bool:
        embedding = _embedding(tensors(folder))
        digests = self._digests(folder, [HEAD, embedding] if embedding else [])
        return bool(digests) and digests[HEAD] == digests[embedding]

    def _wanted(self, folder: Path) -> dict[str, str]:
        forms = self._digests(folder, list(self.parameters))
        return self._by_tensor({name: digests[self.parameters[name]] for name, digests in forms.items()})

    def _by_tensor(self, digests: Parameters) -> dict[str, str]:
        return {part: digest for name, digest in digests.items() for part in parts_of(name)}

    def _digests(self, folder: Path, names: list[str]) -> dict[str, list[str]]:
        """The digest of each form that a parameter may have; parameters that the folder lacks are absent."""
        places = tensors(folder)
        embedding = _embedding(places)
        if HEAD not in places and embedding:  # it is tied
            places[HEAD] = places[embedding]
        with ExitStack() as stack:
            files = {place.file for place in places.values()}
            opened = {file: stack.enter_context(safe_open(file, framework="pt")) for file in files}

            def read(name: str) -> Tensor:
                place = places[name]
                return opened[place.file].get_tensor(place.name).to(self._dtype)

            known = [name for name in names if all(part in places and places[part].shape for part in parts_of(name))]
            with ThreadPoolExecutor(_THREADS) as pool:
                return dict(zip(known, pool.map(lambda name: _forms(name, read), known), strict=True))


def parts_of(parameter: str) -> list[str]:
    """The published tensors that a server keeps one after another in this parameter; its own name if it is one."""
    module, _, kind = parameter.rpartition(".")
    owner, _, leaf = module.rpartition(".")
    return [f"{owner}.{part}.{kind}" for part in _FUSED[leaf]] if leaf in _FUSED else [parameter]


def _embedding(names: Iterable[str]) -> str:
    return next((name for name in names if name.endswith(EMBEDDING)), "")


def _with_head(digests: dict[str, str], tied: bool) -> dict[str, str]:
    """A server has one parameter for both; kernels that pack a copy of the head pack other layers, too."""
    embedding = _embedding(digests)
    return {**digests, HEAD: digests[embedding]} if tied and embedding else digests


def _forms(parameter: str, read: Callable[[str], Tensor]) -> list[str]:
    """As published one after another, and with the vocabulary filled up."""
    digest, rows, width = hashlib.sha256(), 0, 0
    for part in parts_of(parameter):
        tensor = read(part)
        digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
        rows, width = rows + len(tensor), tensor[0].nbytes
    plain = digest.hexdigest()
    digest.update(bytes(-rows % _VOCABULARY_BLOCK * width))
    return [plain, digest.hexdigest()]
