"""What a server's parameters hash to, from a folder: fused, padded, tied; and what is left to its answers."""

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.services.rollout.planted_weights import planted
from trackway.rollout.engines.remote.digests import ServerDigests, by_parameter
from trackway.rollout.engines.weight_proof import HeldDigests

LAYER = "model.layers.0"
Q, K, V, O = (f"{LAYER}.self_attn.{kind}_proj.weight" for kind in "qkvo")  # noqa: E741
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
NORM = "model.norm.weight"


def sha256(*tensors: Tensor) -> str:
    parts = (tensor.to(torch.bfloat16).contiguous().view(torch.uint8).numpy().tobytes() for tensor in tensors)
    return hashlib.sha256(b"".join(parts)).hexdigest()


def as_served(folder: Path) -> dict[str, str]:
    """What vLLM tells of some of a tied model's parameters, in bfloat16."""
    weights = load_file(folder / "model.safetensors")
    padding = torch.zeros(128 - 97, 32)
    return {
        f"{LAYER}.self_attn.qkv_proj.weight": sha256(weights[Q], weights[K], weights[V]),
        f"{LAYER}.self_attn.o_proj.weight": hashlib.sha256(b"").hexdigest(),  # packed
        NORM: sha256(weights[NORM]),
        EMBEDDING: sha256(weights[EMBEDDING], padding),
        "model.rotary.cos_sin": "whatever",
    }


def published(base: Path, folder: Path, *changed: str) -> Path:
    """The base's weights with an explicit head, and some tensors moved."""

    def change(weights: dict[str, Tensor]) -> None:
        for name in changed:
            weights[name] = weights[name] + 0.5
        weights[HEAD] = weights[EMBEDDING].clone()

    return planted(base, folder, change)


@pytest.fixture
def base(folders: Callable[[str, int], Path]) -> Path:
    """A tied model with a vocabulary of 97."""
    return folders("qwen3-tied", 0)


@pytest.fixture
def digests(base: Path) -> ServerDigests:
    """Of a server that has just loaded it."""
    return ServerDigests(base, "bfloat16", as_served(base))


def test_only_parameters_that_were_understood_on_the_base_weights_are_compared(digests: ServerDigests) -> None:
    assert set(digests.parameters) == {f"{LAYER}.self_attn.qkv_proj.weight", NORM, EMBEDDING}


def test_new_weights_are_right_by_tensor_and_the_others_are_counted(
    digests: ServerDigests, base: Path, tmp_path: Path
) -> None:
    new = published(base, tmp_path / "2", Q, NORM, EMBEDDING)

    held = digests.compare(new, as_served(new), base)

    assert held.published == len(load_file(new / "model.safetensors")) == 25
    assert (set(held.right), held.old, held.other, held.complete) == ({Q, K, V, NORM, EMBEDDING}, [], [], False)


def test_old_weights_are_old_and_one_of_a_fused_parameter_marks_all_of_it(
    digests: ServerDigests, base: Path, tmp_path: Path
) -> None:
    new = published(base, tmp_path / "2", Q, NORM, EMBEDDING)
    without_q = published(base, tmp_path / "left-out", NORM, EMBEDDING)

    kept = digests.compare(new, as_served(base), base)
    left_out = digests.compare(new, as_served(without_q), base)
    pruned = digests.compare(new, as_served(base), tmp_path / "pruned")

    assert (set(kept.old), kept.right) == ({Q, K, V, NORM, EMBEDDING}, [])
    assert (set(left_out.old), set(left_out.right)) == ({Q, K, V}, {NORM, EMBEDDING})
    assert (pruned.old, set(pruned.other)) == ([], {Q, K, V, NORM, EMBEDDING})


def test_a_tied_head_is_told_by_the_embedding_once_nothing_else_is_missing(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    base, new, untied = tmp_path / "base", tmp_path / "2", tmp_path / "untied"
    embedding = torch.randn(64, 4).bfloat16()
    for folder, tensors in (
        (base, {EMBEDDING: embedding}),
        (new, {EMBEDDING: embedding + 1, HEAD: embedding + 1}),
        (untied, {EMBEDDING: embedding + 1, HEAD: embedding}),
    ):
        folder.mkdir()
        save_file(tensors, folder / "model.safetensors")
    digests = ServerDigests(base, "bfloat16", {EMBEDDING: sha256(embedding)})

    assert digests.compare(new, {EMBEDDING: sha256(embedding + 1)}, base) == HeldDigests(
        [EMBEDDING, HEAD], [], [], 0, 2
    )
    assert set(digests.compare(new, {EMBEDDING: sha256(embedding)}, base).old) == {EMBEDDING, HEAD}
    assert not digests.compare(untied, {EMBEDDING: sha256(embedding + 1)}, base).complete


def test_ranks_are_taken_off_and_parameters_in_parts_are_not_told() -> None:
    assert by_parameter({"dp0:pp0:pcp0:tp0:a.weight": "1", "dp0:pp1:pcp0:tp0:b.weight": "2"}) == {
        "a.weight": "1",
        "b.weight": "2",
    }
    assert by_parameter({"dp0:pp0:pcp0:tp0:a.weight": "1", "dp0:pp0:pcp0:tp1:a.weight": "2"}) == {}
