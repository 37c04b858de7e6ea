"""Expected hashes of an inference server's parameters, computed from a folder of published weights.

A server may fuse, pad, shard or quantise tensors. The digests of the base weights, which it loads itself, show which
parameters have a known form. Only these are compared later; the others are checked by the server's logprobs.
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
_ADAPTED = ".base_layer."
"""In vLLM's names of layers that may have an adapter."""
_VOCABULARY_BLOCK = 64
"""vLLM pads the vocabulary with rows of zeros to a multiple of this."""
_THREADS = min(8, os.cpu_count() or 1)

Parameters = Mapping[str, str]
"""Digest by parameter name, without the rank."""


def by_parameter(checksums: Mapping[str, str]) -> dict[str, str]:
    """A server's digests without ranks; empty when a parameter is split over several ranks."""
    named = {_RANK.sub("", name).replace(_ADAPTED, "."): digest for name, digest in checksums.items()}
    return named if len(named) == len(checksums) else {}


class ServerDigests:
    """Compares a server's parameters with a folder's tensors, for the parameters of known form."""

    def __init__(self, base: Path, dtype: str, held: Parameters) -> None:
        self._dtype = getattr(torch, dtype)
        understood = self._digests(base, list(held))
        self.parameters = {name: forms.index(held[name]) for name, forms in understood.items() if held[name] in forms}
        """Index in `_forms` of the form in which the server holds the parameter, by name."""

    def compare(self, folder: Path, held: Parameters, before: Path) -> HeldDigests:
        """Compares the server's tensors with the folder's; `before` is the folder of the previous weights."""
        published = dict.fromkeys(tensors(folder), "not compared")
        by_tensor = self._by_tensor({name: digest for name, digest in held.items() if name in self.parameters})
        tied = published.keys() - by_tensor.keys() == {HEAD} and self._is_tied(folder)
        by_tensor, wanted = _with_head(by_tensor, tied), _with_head(self._wanted(folder), tied)
        result = compare_digests(by_tensor, published | wanted)
        if result.other and before.is_dir():
            result = compare_digests(by_tensor, published | wanted, _with_head(self._wanted(before), tied))
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
        """The digest of each form of a parameter; parameters that the folder lacks are absent."""
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
    """The published tensors that a server concatenates in this parameter; itself if it is not fused."""
    module, _, kind = parameter.rpartition(".")
    owner, _, leaf = module.rpartition(".")
    return [f"{owner}.{part}.{kind}" for part in _FUSED[leaf]] if leaf in _FUSED else [parameter]


def _embedding(names: Iterable[str]) -> str:
    return next((name for name in names if name.endswith(EMBEDDING)), "")


def _with_head(digests: dict[str, str], tied: bool) -> dict[str, str]:
    """Tied weights share one parameter on a server; kernels that repack the head also repack other layers."""
    embedding = _embedding(digests)
    return {**digests, HEAD: digests[embedding]} if tied and embedding else digests


def _forms(parameter: str, read: Callable[[str], Tensor]) -> list[str]:
    """As published and concatenated, and with the vocabulary padded."""
    digest, rows, width = hashlib.sha256(), 0, 0
    for part in parts_of(parameter):
        tensor = read(part)
        digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
        rows, width = rows + len(tensor), tensor[0].nbytes
    plain = digest.hexdigest()
    digest.update(bytes(-rows % _VOCABULARY_BLOCK * width))
    return [plain, digest.hexdigest()]
