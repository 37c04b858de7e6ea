"""A packed row is what its sequences are one by one: by value, against the padded rows of the same batch."""

import random
from collections.abc import Callable
from dataclasses import FrozenInstanceError, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.services.trainer.learner_settings import learner_config
from trackway.learner import packing
from trackway.learner.batch import TrainingBatch
from trackway.learner.config import LearnerConfig, PolicySettings
from trackway.learner.head import token_logprobs
from trackway.learner.learner import Learner
from trackway.learner.packing import ATTENTION, PackedRow, SequenceLengths, attend_by_sequence, can_pack
from trackway.learner.policy import Policy
from trackway.learner.ranks.sequence_parallel import SequenceRanks
from trackway.wire.trajectory import Trajectory

pytestmark = pytest.mark.slow

Rollout = Callable[..., Trajectory]

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 48,
    "initializer_range": 0.5,
}


def ragged(rollout: Rollout, count: int = 8) -> list[Trajectory]:
    draw = random.Random(4)
    made = []
    for row in range(count):
        mask = [1, *(draw.randint(0, 1) for _ in range(draw.choice([0, 1, 3, 14])))]
        made.append(
            rollout(
                row // 4,
                row % 4,
                float(row % 3),
                prompt_ids=[draw.randrange(64) for _ in range(draw.choice([1, 2, 9]))],
                response_ids=[draw.randrange(64) for _ in mask],
                response_mask=mask,
                response_logprobs=[-draw.uniform(1, 4) * bit for bit in mask],
            )
        )
    return made


def without_padding(config: LearnerConfig) -> LearnerConfig:
    """The same learner with micro-batches packed into one row."""
    return replace(config, model=config.model.model_copy(update={"use_remove_padding": True}))


def updated(config: LearnerConfig, batch: list[Trajectory]) -> tuple[list[torch.Tensor], dict[str, float]]:
    """The gradients of the first optimizer step, and the update's metrics."""
    learner, seen = Learner(config), []
    parameters = list(learner.policy.model.parameters())
    learner.optimizer.register_step_pre_hook(
        lambda *_: seen.append([p.grad.clone() for p in parameters if p.grad is not None])
    )
    metrics = learner.update(batch).metrics
    return seen[0], metrics


@pytest.mark.parametrize(("dtype", "atol"), [("float64", 1e-10), ("float32", 1e-5)])
@pytest.mark.parametrize("micro_batch_size", [1, 3, None])
def test_packed_and_padded_batches_have_the_same_logprobs(
    tiny_model: Path, rollout: Rollout, dtype: str, atol: float, micro_batch_size: int | None
):
    batch = ragged(rollout)
    padded = learner_config(tiny_model, dtype=dtype, micro_batch_size=micro_batch_size)

    packed = Learner(without_padding(padded)).log_probs(batch)

    for ours, theirs in zip(packed, Learner(padded).log_probs(batch), strict=True):
        assert ours == pytest.approx(theirs, abs=atol)


@pytest.mark.parametrize(("dtype", "atol"), [("float64", 1e-10), ("float32", 1e-5)])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", ["low_var_kl", "full"])
def test_packed_and_padded_batches_have_the_same_gradients_and_metrics(
    tiny_model: Path, rollout: Rollout, dtype: str, atol: float, checkpointing: bool, kind: str
):
    batch = ragged(rollout)
    padded = learner_config(
        tiny_model,
        dtype=dtype,
        micro_batch_size=5,
        use_kl_loss=True,
        kl_loss_type=kind,
        entropy_coeff=0.05,
        gradient_checkpointing=checkpointing,
    )

    expected, theirs = updated(padded, batch)
    gradients, ours = updated(without_padding(padded), batch)

    assert max(float(gradient.abs().max()) for gradient in expected) > 0.01
    torch.testing.assert_close(gradients, expected, rtol=atol, atol=atol)
    assert ours == pytest.approx(theirs, rel=atol, abs=atol)


def test_a_sequence_does_not_see_its_neighbours_in_the_row(tiny_model: Path, rollout: Rollout):
    learner = Learner(learner_config(tiny_model, dtype="float64", remove_padding=True))
    before, own, after = ragged(rollout, 3)
    others = [t.model_copy(update={"response_ids": [1] * len(t.response_ids)}) for t in (before, after)]

    among, alone = learner.log_probs([before, own, after])[1], learner.log_probs([own])[0]

    assert learner.log_probs([others[0], own, others[1]])[1] == pytest.approx(among, abs=1e-12)
    assert alone == pytest.approx(among, abs=1e-12)


def test_a_packed_row_is_the_inputs_end_to_end_with_positions_of_their_own(rollout: Rollout):
    short = rollout(prompt_ids=[1, 2], response_ids=[3], response_mask=[1], response_logprobs=[-0.5])

    row = PackedRow.of(TrainingBatch.of([rollout(), short], [0.0, 0.0]))

    assert row.input_ids.tolist() == [[10, 11, 12, 20, 21, 30, 31, 22, 1, 2]]
    assert row.target_ids.tolist() == [[11, 12, 20, 21, 30, 31, 22, 23, 2, 3]]
    assert row.position_ids.tolist() == [[0, 1, 2, 3, 4, 5, 6, 7, 0, 1]]
    assert row.response_mask.int().tolist() == [[0, 0, 1, 1, 0, 0, 1, 1, 0, 1]]
    assert row.lengths.sizes == [8, 2]


@pytest.mark.parametrize(
    ("size", "shares", "lengths"),
    [
        (2, [[10, 11, 12, 20, 21], [30, 31, 22, 1, 2]], [8, 2]),
        (3, [[10, 11, 12, 20], [21, 30, 31, 22], [1, 2, 0, 0]], [8, 2, 2]),
        (4, [[10, 11, 12], [20, 21, 30], [31, 22, 1], [2, 0, 0]], [8, 2, 2]),
    ],
)
def test_ranks_have_equal_shares_of_a_packed_row_whose_padding_is_a_sequence_of_its_own(
    rollout: Rollout, size: int, shares: list[list[int]], lengths: list[int]
):
    short = rollout(prompt_ids=[1, 2], response_ids=[3], response_mask=[1], response_logprobs=[-0.5])
    row = PackedRow.of(TrainingBatch.of([rollout(), short], [0.0, 0.0]))

    parts = [row.share(SequenceRanks(size, index, NO_GROUP)) for index in range(size)]

    assert [part.input_ids[0].tolist() for part in parts] == shares
    assert [(part.lengths.sizes, part.lengths.ranks and part.lengths.ranks.size) for part in parts] == [
        (lengths, size)
    ] * size


@pytest.mark.parametrize(
    ("kind", "more", "packs"),
    [
        ("qwen2", {}, True),
        ("llama", {}, True),
        ("gpt2", {"n_positions": 64}, True),
        ("mistral", {"sliding_window": 3}, False),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}, False),
    ],
)
def test_only_models_of_full_attention_are_packed_and_all_have_the_same_logprobs(
    kind: str, more: dict[str, int], packs: bool, rollout: Rollout, tmp_path: Path
):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SMALL, **more)).save_pretrained(tmp_path)
    batch = ragged(rollout)
    learner = Learner(learner_config(tmp_path, dtype="float64", remove_padding=True))

    logprobs = learner.log_probs(batch)

    assert learner.policy.packs is packs
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    for trajectory, values in zip(batch, logprobs, strict=True):
        assert values == pytest.approx(alone(model, trajectory), abs=1e-10)


def alone(model: PreTrainedModel, trajectory: Trajectory) -> list[float]:
    """The logprobs of a trajectory's response in a row of its own."""
    ids, first = trajectory.prompt_ids + trajectory.response_ids, len(trajectory.prompt_ids)
    with torch.no_grad():
        logp = torch.log_softmax(model(torch.tensor([ids])).logits[0], -1)
    by_model = enumerate(trajectory.response_mask, start=first)
    return [float(logp[place - 1, ids[place]]) if is_model else 0.0 for place, is_model in by_model]


@pytest.mark.parametrize(
    ("change", "packs"),
    [
        ({}, True),
        ({"config._attn_implementation": "sdpa"}, True),
        ({"config._attn_implementation": ATTENTION}, True),
        ({"config._attn_implementation": "eager"}, False),
        ({"_is_stateful": True}, False),
        ({"_supports_attention_backend": False}, False),
        ({"config.sliding_window": 3}, False),
        ({"config.layer_types": ["full_attention", "sliding_attention"]}, False),
        ({"config.layer_types": None}, True),
    ],
)
def test_each_thing_that_cannot_be_cut_by_sequence_keeps_a_model_from_being_packed(
    change: dict[str, object], packs: bool
):
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen2", **SMALL))
    for name, value in change.items():
        *where, attribute = name.split(".")
        setattr(model.config if where else model, attribute, value)

    assert can_pack(model) is packs


class CausalAttention(torch.nn.Module):
    is_causal = True
    num_key_value_groups = 1


NO_GROUP = cast(ProcessGroup, None)


@dataclass(frozen=True)
class AllHeads(SequenceRanks):
    """What a rank has that computes all heads of all tokens, as without an exchange."""

    heads: list[int] = field(default_factory=list[int])
    """Of the queries, the keys and the values that were to be exchanged."""

    def by_heads(self, values: Tensor) -> Tensor:
        self.heads.append(values.shape[1])
        return values

    def by_tokens(self, values: Tensor) -> Tensor:
        return values


def test_attention_over_a_packed_row_is_that_of_each_sequence_and_says_that_it_was_told_the_lengths():
    generator = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(1, 2, 5, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    layer = CausalAttention()
    lengths = SequenceLengths([3, 2])
    before = lengths.seen

    packed, _ = attend_by_sequence(layer, query, key, value, None, lengths)

    assert (before, lengths.seen) == (False, True)
    assert packed.shape == (1, 5, 2, 4)
    for part in (slice(0, 3), slice(3, 5)):
        alone, _ = attend_by_sequence(layer, query[:, :, part], key[:, :, part], value[:, :, part], None)
        torch.testing.assert_close(packed[:, part], alone, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("size", "exchanged"), [(2, [4, 2, 2]), (4, [4, 4, 4])])
def test_heads_of_keys_are_repeated_before_an_exchange_only_for_more_ranks_than_heads(size: int, exchanged: list[int]):
    generator = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(1, heads, 7, 4, generator=generator, dtype=torch.float64) for heads in (4, 2, 2))
    layer, ranks = CausalAttention(), AllHeads(size, 0, NO_GROUP)
    layer.num_key_value_groups = 2

    packed, _ = attend_by_sequence(layer, query, key, value, None, SequenceLengths([4, 3], ranks))

    assert ranks.heads == exchanged
    for part in (slice(0, 4), slice(4, 7)):
        keys, values = (tensor[:, :, part].repeat_interleave(2, dim=1) for tensor in (key, value))
        alone = scaled_dot_product_attention(query[:, :, part], keys, values, is_causal=True)
        torch.testing.assert_close(packed[:, part], alone.transpose(1, 2), rtol=0, atol=1e-12)


@pytest.fixture
def grouped_model(tmp_path: Path) -> Path:
    """Two heads of queries to one of keys, 16 wide."""
    torch.manual_seed(0)
    folder = tmp_path / "grouped"
    AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen2", **SMALL)).save_pretrained(folder)
    return folder


def test_on_gpus_the_sequences_of_a_row_are_one_call_of_the_kernel_for_any_lengths_in_half_precision(
    grouped_model: Path, rollout: Rollout, monkeypatch: pytest.MonkeyPatch
):
    batch = ragged(rollout)
    config = learner_config(grouped_model, dtype="bfloat16", micro_batch_size=4, remove_padding=True)
    expected, theirs = updated(config, batch)
    seen: list[tuple[list[int], int]] = []

    def kernel(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor,
        max_q: int,
        max_k: int,
        scale: float | None,
        window_size: tuple[int, int],
        enable_gqa: bool,
    ) -> Tensor:
        """What `torch.nn.attention.varlen` documents, in PyTorch's own kernels for a CPU."""
        assert {query.dtype, key.dtype, value.dtype} == {torch.bfloat16}
        assert (query.shape[1:], key.shape[1:], enable_gqa) == ((2, 16), (1, 16), True)
        assert (window_size, cu_seq_q.dtype, max_q) == ((-1, 0), torch.int32, max_k)
        assert cu_seq_q.tolist() == cu_seq_k.tolist()
        seen.append((cu_seq_q.tolist(), max_q))
        parts = (
            states.transpose(0, 1)[None].tensor_split(cu_seq_q.tolist()[1:-1], 2) for states in (query, key, value)
        )
        outputs = [
            scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1, scale=scale, enable_gqa=enable_gqa)
            for q, k, v in zip(*parts, strict=True)
        ]
        return torch.cat(outputs, 2)[0].transpose(0, 1)

    on_a_gpu(monkeypatch)
    monkeypatch.setattr(packing, "varlen_attn", kernel)
    gradients, ours = updated(config, batch)

    assert seen
    for offsets, longest in seen:
        assert longest == max(end - begin for begin, end in pairwise(offsets))
    torch.testing.assert_close(gradients, expected, rtol=0, atol=0)
    assert ours == theirs


@pytest.mark.parametrize("packs", [True, False])
def test_on_gpus_heads_of_keys_are_repeated_in_float32_so_that_no_scores_are_kept(
    packs: bool, grouped_model: Path, rollout: Rollout, monkeypatch: pytest.MonkeyPatch
):
    batch = ragged(rollout)
    config = learner_config(grouped_model, micro_batch_size=4, remove_padding=packs)
    expected, _ = updated(config, batch)
    heads: list[tuple[int, int, bool]] = []

    def recorded(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool = False, **more: Any) -> Tensor:
        heads.append((query.shape[1], key.shape[1], enable_gqa))
        return scaled_dot_product_attention(query, key, value, enable_gqa=enable_gqa, **more)

    on_a_gpu(monkeypatch)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", recorded)
    gradients, _ = updated(config, batch)

    assert set(heads) == {(2, 2, False)}
    torch.testing.assert_close(gradients, expected, rtol=1e-5, atol=1e-6)


def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are chosen as on a GPU of the generation Hopper."""
    monkeypatch.setattr(packing, "_on_gpu", lambda tensor: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


def test_a_packed_row_cannot_be_changed(rollout: Rollout):
    row = PackedRow.of(TrainingBatch.of([rollout()], [0.0]))

    with pytest.raises(FrozenInstanceError):
        row.input_ids = row.position_ids  # pyright: ignore[reportAttributeAccessIssue]


def test_attention_that_is_not_told_the_lengths_is_an_error(tiny_model: Path, rollout: Rollout):
    policy = Policy(PolicySettings(str(tiny_model), remove_padding=True))
    policy.model.set_attn_implementation("sdpa")

    with pytest.raises(RuntimeError, match="attention of Qwen3ForCausalLM to be given the lengths of 8 sequences"):
        policy.token_values(TrainingBatch.of(ragged(rollout), [0.0] * 8), 1.0, token_logprobs)


def test_a_packing_model_is_exported_like_any_other(tiny_model: Path, tmp_path: Path):
    for name, packs in (("packed", True), ("padded", False)):
        Policy(PolicySettings(str(tiny_model), remove_padding=packs)).export(tmp_path / name)

    assert (tmp_path / "packed/config.json").read_text() == (tmp_path / "padded/config.json").read_text()
