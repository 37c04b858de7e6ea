"""The head in chunks gives the losses and gradients of whole logits, which it never holds."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tests.services.trainer.learner_settings import learner_config
from trackway.learner.algorithm import entropy_from_logits
from trackway.learner.batch import TrainingBatch
from trackway.learner.head import HeadChunks, entropy_measure, token_logprobs
from trackway.learner.learner import Learner
from trackway.wire.trajectory import Trajectory

pytestmark = pytest.mark.slow

Rollout = Callable[..., Trajectory]
TOLERANCE = {"float64": 1e-10, "float32": 1e-5}
EVERYTHING = {
    "use_kl_loss": True,
    "kl_loss_coef": 0.1,
    "entropy_coeff": 0.05,
    "bypass_mode": False,
    "temperature": 0.7,
    "micro_batch_size": 5,
}
IN_CHUNKS = {"use_fused_kernels": True, "chunk_size": 7}
SIZES: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}


@pytest.fixture
def batch(rollout: Rollout) -> list[Trajectory]:
    """Eight trajectories, 60 model tokens."""
    draw, made = random.Random(4), []
    for row in range(8):
        mask = [1, *(draw.randint(0, 1) for _ in range(2 * row))]
        fields = {
            "prompt_ids": [draw.randrange(60) for _ in range(3)],
            "response_ids": [draw.randrange(60) for _ in mask],
            "response_mask": mask,
            "response_logprobs": [-draw.uniform(1, 4) * bit for bit in mask],
        }
        made.append(rollout(row // 4, row % 4, float(row % 3), **fields))
    return made


@pytest.fixture(scope="module")
def untied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with a head of its own."""
    folder = tmp_path_factory.mktemp("untied")
    torch.manual_seed(1)
    config = LlamaConfig(vocab_size=61, tie_word_embeddings=False, initializer_range=0.5, **SIZES)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def updated(folder: Path, batch: list[Trajectory], **settings: object) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The gradients of the first optimizer step, and the update's metrics."""
    learner = Learner(learner_config(folder, **EVERYTHING | settings))
    gradients: dict[str, Tensor] = {}

    def keep(*_: object) -> None:
        named = learner.policy.model.named_parameters()
        gradients.update({name: p.grad.clone() for name, p in named if p.grad is not None})

    learner.optimizer.register_step_pre_hook(keep)
    return gradients, learner.update(batch).metrics


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("tiny_model", {}),
        ("tiny_model", {"remove_padding": True, "gradient_checkpointing": True, "chunk_size": 1}),
        ("tiny_model", {"kl_loss_type": "full", "entropy_coeff": 0.0}),
        ("tiny_model", {"lora_rank": 3, "remove_padding": True}),
        ("tiny_model", {"lora_rank": 3, "kl_loss_type": "full"}),
        ("untied_model", {"kl_loss_type": "full", "remove_padding": True}),
        ("untied_model", {"calculate_sum_pi_squared": True}),
    ],
)
def test_the_head_in_chunks_gives_the_gradients_and_metrics_of_whole_logits(
    request: pytest.FixtureRequest, batch: list[Trajectory], dtype: str, name: str, settings: dict[str, object]
):
    folder, atol = request.getfixturevalue(name), TOLERANCE[dtype]
    expected, theirs = updated(folder, batch, **settings | {"dtype": dtype, "use_fused_kernels": False})

    gradients, ours = updated(folder, batch, **IN_CHUNKS | settings | {"dtype": dtype})

    assert max(float(gradient.abs().max()) for gradient in expected.values()) > 0.01
    torch.testing.assert_close(gradients, expected, rtol=atol, atol=atol)
    assert ours == pytest.approx(theirs, rel=atol, abs=atol)


class LargestLogits(TorchDispatchMode):
    """Records the most rows of a tensor [n, 64] that any operation returns.

    The head's weights transposed, [32, 64], do not count.
    """

    rows = 0

    def __torch_dispatch__(
        self, func: Callable[..., object], types: object, args: tuple[object, ...] = (), kwargs: object = None
    ) -> object:
        result = func(*args, **(kwargs or {}))  # pyright: ignore[reportCallIssue]
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.shape[-1:] == (64,) and tensor.shape != (32, 64):
                self.rows = max(self.rows, tensor.numel() // 64)
        return result


@pytest.fixture(scope="module")
def model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with other sizes, so that only logits have 64 columns."""
    folder = tmp_path_factory.mktemp("model")
    tiny = AutoModelForCausalLM.from_pretrained(tiny_model)
    tiny.config.intermediate_size = 48
    type(tiny)(tiny.config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ["low_var_kl", "full"])
def test_no_more_logits_than_a_chunk_of_them_ever_exist(model: Path, batch: list[Trajectory], kind: str):
    def most_rows(**settings: object) -> int:
        keys = EVERYTHING | {"kl_loss_type": kind, "remove_padding": True} | settings
        learner = Learner(learner_config(model, **keys))
        with LargestLogits() as largest:
            learner.update(batch)
        return largest.rows

    assert most_rows(use_fused_kernels=True, chunk_size=2) == 2
    assert most_rows(use_fused_kernels=False) > 20


def test_none_of_them_is_kept_for_the_backward_pass(model: Path, batch: list[Trajectory]):
    entropy = entropy_measure(entropy_from_logits, with_gradient=True)

    def kept(**settings: object) -> int:
        policy, sizes = Learner(learner_config(model, **settings)).policy, list[int]()

        def pack(tensor: Tensor) -> Tensor:
            if tensor.shape[-1:] == (64,) and tensor.shape != (32, 64):
                sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            policy.token_values(TrainingBatch.of(batch, [0.0] * len(batch)), 1.0, token_logprobs, entropy)
        return sum(sizes)

    assert kept(use_fused_kernels=False) > 0
    assert kept(use_fused_kernels=True, chunk_size=1000) > 0
    assert kept(**IN_CHUNKS) == 0


def test_by_default_only_large_logits_are_computed_in_chunks(tiny_model: Path):
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    by_default = HeadChunks.of(model, None, 1024)

    assert (by_default.splits(2**20), by_default.splits(2**20 + 1)) == (False, True)  # of 64 values each
    assert [HeadChunks.of(model, True, 7).splits(tokens) for tokens in (7, 8)] == [False, True]
    assert not HeadChunks.of(model, False, 7).splits(2**40)


@pytest.mark.parametrize(("kind", "keys"), [("granite", {"logits_scaling": 3.0}), ("cohere", {"logit_scale": 0.3})])
def test_logits_that_a_model_changes_after_its_head_are_computed_whole(
    kind: str, keys: dict[str, float], batch: list[Trajectory], tmp_path: Path
):
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, vocab_size=64, num_key_value_heads=2, pad_token_id=0, **SIZES, **keys)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    settings = {"kl_loss_type": "full", "dtype": "float64", "chunk_size": 2}

    gradients, metrics = updated(tmp_path, batch, **settings)

    assert HeadChunks.of(AutoModelForCausalLM.from_pretrained(tmp_path), None, 2).splits(2**40) is False
    expected, theirs = updated(tmp_path, batch, **settings | {"use_fused_kernels": False})
    torch.testing.assert_close(gradients, expected, rtol=0, atol=0)
    assert metrics == theirs
    with pytest.raises(ValueError, match=r"logits are what its head computes, got .*set .*use_fused_kernels=null"):
        Learner(learner_config(tmp_path, use_fused_kernels=True))
