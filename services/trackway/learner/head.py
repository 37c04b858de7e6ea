"""Measures of a model's logits, in chunks of tokens, so that the logits never exist whole.

A loss needs a few numbers of each token's logits [V], which for large vocabularies are the largest tensors of a step.
`in_head` puts the measuring into the forward of the vocabulary head: the logits of one chunk of tokens are computed,
measured and freed, and with a gradient computed again in the backward pass. There the head's weights are those that the
model computes with: gathered by FSDP2, under autocast, rounded.

`torch.compile` makes the entropy read the logits once and keep no tensor of their size. The numbers of a row do not
depend on what was compiled before: the first rows that the compiled function sees, whose number the compiler may use as
a hint, are always the probe's. So a resumed run repeats exactly.
"""

import importlib
import math
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Self, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from trackway.learner.algorithm import entropy_from_logits, exact_kl
from trackway.learner.config import WHOLE_LOGITS

PROBE_ROWS = 64


def compiled_entropy(like: Tensor, *, with_gradient: bool) -> Callable[[Tensor], Tensor]:
    """`entropy_from_logits` compiled for logits [n, V] of the width, type and device of `like` [V], for any n.

    Raises ValueError where it cannot be compiled, as without a C++ compiler.
    """
    _import_setuptools()
    compiled = torch.compile(entropy_from_logits, dynamic=True, fullgraph=True)

    def entropy(logits: Tensor) -> Tensor:
        # The compiler takes 0 and 1 rows for constants, and would make functions for them.
        if len(logits) < 2:
            return entropy(torch.cat([logits, logits]))[:1] if len(logits) else entropy_from_logits(logits)
        # Logits have their type already, and any other state of autocast would make a second function.
        with torch.autocast(like.device.type, torch.bfloat16, enabled=False, cache_enabled=False):
            return compiled(logits)

    rows = PROBE_ROWS + (len(like) == PROBE_ROWS)  # of equal sizes the compiler takes one for the other
    probe = torch.zeros(rows, *like.shape, dtype=like.dtype, device=like.device, requires_grad=with_gradient)
    try:
        with torch.set_grad_enabled(with_gradient):
            entropies = entropy(probe)
        if with_gradient:
            entropies.sum().backward()
    except Exception as error:  # torch's compilers raise errors of many types
        cause = getattr(error, "inner_exception", error)
        raise ValueError(
            "expected a compiler that torch.compile can use for actor.use_torch_compile (on CPUs a C++ compiler, such "
            f"as the package g++), got {type(cause).__name__}: {str(cause).strip().splitlines()[0]}; install it, or "
            "set the key to false"
        ) from error
    return entropy


def _import_setuptools() -> None:
    """Imports what torch's compiler needs of it, also on Python 3.11 after a library has looked for pip.

    A search for pip hides setuptools' own distutils from setuptools (`spec_for_pip` in its `_distutils_hack`).
    """
    try:
        importlib.import_module("setuptools")
    except ImportError:
        return  # torch says what it lacks
    except AssertionError:
        os.environ["SETUPTOOLS_USE_DISTUTILS"] = "stdlib"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the standard library's distutils is deprecated
            importlib.import_module("setuptools")


class TopTokens(NamedTuple):
    """A teacher's k most likely tokens at each of n positions."""

    ids: Tensor
    """[n, k] int64."""
    logprobs: Tensor
    """[n, k]."""


class TokenLogits(NamedTuple):
    """The logits of n tokens."""

    logits: Tensor
    """[n, V], divided by the temperature."""
    targets: Tensor
    """[n] int64: the tokens that they predict; [n, K] where a measure takes K of each."""
    ref_logits: Tensor | None = None
    """[n, V]: the reference's, or None without one."""
    top: TopTokens | None = None
    """The teacher's, or None without one."""


Measure: TypeAlias = Callable[[TokenLogits], Tensor]
"""[n]: a number of each token."""


class RefInputs(NamedTuple):
    """Inputs of a reference's head."""

    values: Tensor
    """[N, ...]: of each token."""
    logits: Callable[[Tensor], Tensor]
    """[n, V], divided by the temperature, from the values of n tokens."""


def token_logprobs(tokens: TokenLogits) -> Tensor:
    """The logprobs of the predicted tokens."""
    return -nn.functional.cross_entropy(tokens.logits, tokens.targets, reduction="none")


def sum_pi_squared(tokens: TokenLogits) -> Tensor:
    """The sum over the vocabulary of squared probabilities."""
    return (2 * torch.log_softmax(tokens.logits, dim=-1)).exp().sum(-1)


def entropy_measure(entropy: Callable[[Tensor], Tensor], *, with_gradient: bool) -> Measure:
    """The entropy in nats, of which nothing is kept for the backward pass without a gradient."""

    def measure(tokens: TokenLogits) -> Tensor:
        with torch.set_grad_enabled(with_gradient and torch.is_grad_enabled()):
            return entropy(tokens.logits)

    return measure


def full_kl(tokens: TokenLogits) -> Tensor:
    """The KL divergence from the reference over the vocabulary. Raises ValueError without a reference's logits."""
    if tokens.ref_logits is None:
        raise ValueError("expected the reference's logits for the full KL, got none; compute them for this micro-batch")
    return exact_kl(tokens.logits, tokens.ref_logits)


@dataclass(frozen=True)
class HeadChunks:
    """How logits are computed: whole, or in chunks of some tokens."""

    size: int
    """Most tokens of a chunk."""
    are_possible: bool
    """True if the model's logits are what its head computes. Some models scale them, or bound them, afterwards."""
    largest_whole: float
    """Tokens whose logits are computed whole, at most, if that is more than `size`."""

    @classmethod
    def of(cls, model: PreTrainedModel, wanted: bool | None, size: int) -> Self:
        """Chunks of `size` tokens of the model's head; with None only for logits of more than WHOLE_LOGITS values.

        The weights of the model may be on the meta device. Raises ValueError where they are wanted and not possible.
        """
        are_possible, width = _probed(model)
        if wanted and not are_possible:
            raise ValueError(
                f"expected a model whose logits are what its head computes, got {type(model).__name__}, which changes "
                "them afterwards; set actor_rollout_ref.model.use_fused_kernels=null"
            )
        by_default = WHOLE_LOGITS / width if are_possible else math.inf
        return cls(size, are_possible, {True: 0, False: math.inf, None: by_default}[wanted])

    def splits(self, tokens: int) -> bool:
        """Return whether the logits of so many tokens are computed in chunks."""
        return tokens > max(self.size, self.largest_whole)


def measure_in_chunks(
    logits: Callable[[Tensor], Tensor],
    hidden: Tensor,
    targets: Tensor,
    measures: Sequence[Measure],
    chunk_size: int,
    ref: RefInputs | None = None,
    top: TopTokens | None = None,
) -> Tensor:
    """[N, measures] of the hidden states [N, H] before the head, `chunk_size` tokens at a time.

    `logits` makes [n, V], divided by the temperature, of [n, H]. With a gradient, each chunk's are computed twice.
    """

    def measured(part: Tensor, predicted: Tensor, ref_part: Tensor | None, *top_part: Tensor) -> Tensor:
        ref_logits = None
        if ref is not None and ref_part is not None:
            with torch.no_grad():
                ref_logits = ref.logits(ref_part)
        tokens = TokenLogits(logits(part), predicted, ref_logits, TopTokens(*top_part) if top_part else None)
        return torch.stack([measure(tokens) for measure in measures], dim=-1)

    parts = hidden.split(chunk_size)
    ref_parts = [None] * len(parts) if ref is None else ref.values.split(chunk_size)
    tops = [values.split(chunk_size) for values in top or ()]
    chunks = zip(parts, targets.split(chunk_size), ref_parts, *tops, strict=True)
    if not torch.is_grad_enabled():
        return torch.cat([measured(*chunk) for chunk in chunks])
    return torch.cat([checkpoint(measured, *chunk, use_reentrant=False, preserve_rng_state=False) for chunk in chunks])


@contextmanager
def in_head(model: PreTrainedModel, forward: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """A context in which the model's head computes this of the hidden states [B, T, H], and the model returns it."""
    head = head_of(model)
    head.forward = forward
    try:
        yield
    finally:
        del head.forward


class Float32Head(nn.Linear):
    """A head whose logits under autocast are float32 products of bfloat16 weights and states.

    vLLM computes them so with `head_dtype: float32`, and SGLang with `--enable-fp32-lm-head`.
    """

    def forward(self, input: Tensor) -> Tensor:
        """[..., V] of hidden states [..., H]."""
        if input.is_meta or not torch.is_autocast_enabled(input.device.type):
            return super().forward(input)
        with torch.autocast(input.device.type, enabled=False):
            states, weight = (tensor.bfloat16().float() for tensor in (input, self.weight))
            return nn.functional.linear(states, weight, None if self.bias is None else self.bias.float())


def to_float32_head(model: PreTrainedModel) -> None:
    """Make the model's head a Float32Head with its weights. Raises ValueError for a head that is no linear layer."""
    head = head_of(model)
    if type(head) is not nn.Linear:
        kind = type(head).__name__
        raise ValueError(f"trackway.float32_head: expected a linear head, got {kind}; set trackway.float32_head=false")
    head.__class__ = Float32Head


def head_logits(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """[n, V] of hidden states [n, H], also inside `in_head`."""
    head = head_of(model)
    return type(head).forward(head, hidden)


class _BaseOutput:
    """Output of a model without its head: its hidden states, [B, T, H], and None for everything optional."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None


def _probed(model: PreTrainedModel) -> tuple[bool, int]:
    """Return whether the model's logits are what its head computes, and how many there are of a token.

    The layers below the head are not computed: the head gets zeros for their hidden states.
    """
    head, computed = head_of(model), list[Tensor]()
    weight = next(head.parameters())
    hidden = torch.zeros(1, 1, weight.shape[-1], dtype=weight.dtype, device=weight.device)

    def keep(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        computed.append(output)

    handle = head.register_forward_hook(keep)
    model.base_model.forward = lambda *_, **__: _BaseOutput(hidden)
    try:
        with torch.no_grad():
            logits = model(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=weight.device), use_cache=False).logits
    finally:
        del model.base_model.forward
        handle.remove()
    return computed[0] is logits, logits.shape[-1]


def head_of(model: PreTrainedModel) -> nn.Module:
    """The vocabulary head. Raises ValueError for a model without one."""
    head = model.get_output_embeddings()
    if head is None:
        raise ValueError(f"expected a causal language model with a vocabulary head, got {type(model).__name__}")
    return head
