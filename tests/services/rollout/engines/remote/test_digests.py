"""What a server's parameters hash to, from a folder: fused, padded, tied, by rank; and what is left to its answers."""

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.services.rollout.planted_weights import planted
from trackway.rollout.engines.remote.digests import DigestChanges, DigestValues
from trackway.rollout.engines.weight_proof import HeldDigests, judge
from trackway.wire.weights import Probe, Verdict, WeightProof

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
def digests(base: Path) -> DigestValues:
    """Of a server that has just loaded it."""
    return DigestValues(base, "bfloat16", as_served(base))


def test_only_parameters_that_were_understood_on_the_base_weights_are_compared(digests: DigestValues) -> None:
    assert set(digests.forms) == {f"{LAYER}.self_attn.qkv_proj.weight", NORM, EMBEDDING}


def test_new_weights_are_right_by_tensor_and_the_others_are_counted(
    digests: DigestValues, base: Path, tmp_path: Path
) -> None:
    new = published(base, tmp_path / "2", Q, NORM, EMBEDDING)

    held = digests.compare(new, as_served(new), base)

    assert held.published == len(load_file(new / "model.safetensors")) == 25
    assert (set(held.right), held.old, held.other, held.complete) == ({Q, K, V, NORM, EMBEDDING}, [], [], False)


def test_old_weights_are_old_and_one_of_a_fused_parameter_marks_all_of_it(
    digests: DigestValues, base: Path, tmp_path: Path
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
    digests = DigestValues(base, "bfloat16", {EMBEDDING: sha256(embedding)})

    assert digests.compare(new, {EMBEDDING: sha256(embedding + 1)}, base) == HeldDigests(
        [EMBEDDING, HEAD], [], [], 0, 2
    )
    assert set(digests.compare(new, {EMBEDDING: sha256(embedding)}, base).old) == {EMBEDDING, HEAD}
    assert not digests.compare(untied, {EMBEDDING: sha256(embedding + 1)}, base).complete


RANKS = 4
"""Each has a quarter of q, and two share a half of k and v."""


def on_ranks(folder: Path) -> dict[str, str]:
    """What vLLM tells of some parameters with tensor parallelism, as its layers divide them, in bfloat16."""
    weights = load_file(folder / "model.safetensors")
    embedding = torch.cat([weights[EMBEDDING], torch.zeros(128 - 97, 32)])
    held: dict[str, str] = {}
    for rank in range(RANKS):
        own, shared = slice(rank * 12, (rank + 1) * 12), slice(rank // 2 * 8, (rank // 2 + 1) * 8)
        held |= {
            f"dp0:pp0:pcp0:tp{rank}:{name}": sha256(*parts)
            for name, parts in {
                f"{LAYER}.self_attn.qkv_proj.weight": (weights[Q][own], weights[K][shared], weights[V][shared]),
                f"{LAYER}.self_attn.o_proj.weight": (weights[O][:, own],),
                f"{LAYER}.mlp.down_proj.weight": (weights[NORM],),  # packed
                NORM: (weights[NORM],),
                EMBEDDING: (embedding[rank * 32 : (rank + 1) * 32],),
            }.items()
        }
    return held


@pytest.fixture
def by_rank(base: Path) -> DigestValues:
    """Of a server with tensor parallelism that has just loaded the base weights."""
    return DigestValues(base, "bfloat16", on_ranks(base))


def test_what_ranks_have_of_a_parameter_is_compared_where_all_of_them_were_understood(
    by_rank: DigestValues, base: Path, tmp_path: Path
) -> None:
    new = published(base, tmp_path / "2", Q, O, NORM, EMBEDDING)
    held, kept = on_ranks(new), on_ranks(base)
    last = {name: digest for name, digest in kept.items() if f"tp{RANKS - 1}:" in name}

    right = by_rank.compare(new, held, base)
    old = by_rank.compare(new, kept, base)
    old_on_one = by_rank.compare(new, held | last, base)

    assert {*by_rank.forms} == {
        *(f"{LAYER}.self_attn.{kind}_proj.weight" for kind in ("qkv", "o")),
        NORM,
        EMBEDDING,
    }
    assert ({*right.right}, right.old, right.other) == ({Q, K, V, O, NORM, EMBEDDING}, [], [])
    assert ({*old.old}, old.right, old.other) == ({Q, K, V, O, NORM, EMBEDDING}, [], [])
    assert ({*old_on_one.other}, old_on_one.right) == ({Q, K, V, O, NORM, EMBEDDING}, [])


def test_parameters_that_one_rank_holds_in_an_unknown_form_are_not_compared(base: Path) -> None:
    held = on_ranks(base)
    held[f"dp0:pp0:pcp0:tp1:{NORM}"] = "packed"

    assert NORM not in DigestValues(base, "bfloat16", held).forms


def own_hash(folder: Path, *kept: str, before: Path | None = None) -> dict[str, str]:
    """What SGLang on GPUs tells of two ranks: values of its own, of the folder's tensors, some of them as before."""
    held = as_served(folder)
    held |= {name: as_served(before or folder)[name] for name in kept}
    del held[f"{LAYER}.self_attn.o_proj.weight"]
    return {
        f"tp{rank}:{name.replace('_proj.', '_proj.base_layer.')}": digest[:16]
        for rank in range(2)
        for name, digest in held.items()
    }


def test_a_parameter_that_was_published_anew_and_has_not_changed_is_old(base: Path, tmp_path: Path) -> None:
    new = published(base, tmp_path / "2", Q, NORM)
    newer = published(base, tmp_path / "3", K)
    digests = DigestChanges(base, "bfloat16", own_hash(base))

    assert digests.compare(new, own_hash(base), base) == HeldDigests(old=[Q, NORM])
    assert digests.compare(new, own_hash(new, NORM, before=base), base) == HeldDigests(old=[NORM], moved=1)
    assert digests.compare(new, own_hash(new), base) == HeldDigests(old=[], moved=2)
    assert digests.compare(newer, own_hash(new), new) == HeldDigests(old=[Q, K, NORM])
    assert digests.compare(newer, own_hash(newer), tmp_path / "unknown") == HeldDigests()


def test_a_change_that_the_servers_type_rounds_away_is_none(base: Path, tmp_path: Path) -> None:
    new = planted(base, tmp_path / "2", lambda weights: weights.update({NORM: weights[NORM] * (1 + 1e-6)}))
    held = own_hash(base)

    assert DigestChanges(base, "bfloat16", held).compare(new, held, base).old == []
    assert DigestChanges(base, "float32", held).compare(new, held, base).old == [NORM]


@pytest.mark.parametrize("server", ["two ranks", "hashes of its own"])
def test_a_server_that_kept_its_weights_is_refused_at_rls_learning_rate_though_its_answers_fit(
    base: Path, tmp_path: Path, server: str
) -> None:
    """40 steps of 1e-6 in bfloat16. The answers differ by a hundredth of rounding, and are none before the load."""
    hashes = on_ranks if server == "two ranks" else own_hash
    digests = (DigestValues if server == "two ranks" else DigestChanges)(base, "bfloat16", hashes(base))
    generator = torch.Generator().manual_seed(0)
    verdicts: list[list[Verdict]] = []
    before = base
    for step in range(40):
        new = planted(
            before, tmp_path / str(step), lambda weights: [moved(tensor, generator) for tensor in weights.values()]
        )
        change = torch.randn(512, generator=generator, dtype=torch.float64) * 0.00004
        answers = [(torch.randn(512, generator=generator, dtype=torch.float64) * 0.02 - 2.0).tolist()]
        probe = Probe(
            token_ids=[0] * 513,
            positions=[*range(1, 513)],
            logprobs=(change - 2.0).tolist(),
            previous=[-2.0] * 512,
        )
        proof = WeightProof(probes=[probe], previous_version=step, dtype="bfloat16", rounding=0.02)
        kept, loaded = (digests.compare(new, hashes(folder), before) for folder in (before, new))
        verdicts.append([judge(proof, "bfloat16", answers, held).verdict for held in (None, kept, loaded)])
        before = new

    assert verdicts == [[Verdict.INDISTINGUISHABLE, Verdict.STALE, Verdict.INDISTINGUISHABLE]] * 40


def moved(tensor: Tensor, generator: torch.Generator) -> None:
    """Add Adam's first step at this rate."""
    tensor.add_(torch.randn(tensor.shape, generator=generator).sign(), alpha=1e-6)
