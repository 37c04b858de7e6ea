"""Digests and probes, published with the weights, by which an engine can check that it holds them.

Probes are sequences of the batch that the learner trained on last, scored before the update and after it. Both times
the weights are rounded to the published dtype, as engines get them, and computed in float32, so that a difference
comes from the version and not from the learner's rounding.
"""

import hashlib
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from trackway.wire.trajectory import Trajectory
from trackway.wire.weights import Probe, TensorDigest

SEQUENCES = 8
"""Sequences of a batch that are scored, besides the fixed one."""
LONGEST = 512
"""Tokens of a sequence. The rest is cut off."""
TOKENS = 512
"""Tokens that are probed, over all sequences: those whose logprobs differ most between the versions."""
_NARROWER = {torch.float64: (torch.float32, torch.bfloat16), torch.float32: (torch.bfloat16,)}
_THREADS = min(8, os.cpu_count() or 1)


@dataclass(frozen=True)
class ScoredSequence:
    """Tokens and the logprobs of tokens 1..n-1 under one version."""

    token_ids: list[int]
    logprobs: list[float]


def choose_sequences(trajectories: Sequence[Trajectory], advantages: Sequence[float]) -> list[list[int]]:
    """The shortest trajectories with a non-zero advantage, without duplicates, cut to LONGEST tokens."""
    moving = [t for t, advantage in zip(trajectories, advantages, strict=True) if advantage != 0.0] or trajectories
    sequences = sorted((t.prompt_ids + t.response_ids for t in moving), key=lambda ids: (len(ids), ids))
    return [list(ids) for ids in dict.fromkeys(tuple(ids[:LONGEST]) for ids in sequences)][:SEQUENCES]


def probes_of(now: Sequence[ScoredSequence], before: Sequence[ScoredSequence] | None) -> list[Probe]:
    """The TOKENS tokens whose logprobs changed most since `before`; every token without a `before`."""
    if before is None:
        return [_probe(sequence, None, list(range(1, len(sequence.token_ids)))) for sequence in now]
    changes = [
        (-abs(new - old), index, position)
        for index, (sequence, earlier) in enumerate(zip(now, before, strict=True))
        for position, (new, old) in enumerate(zip(sequence.logprobs, earlier.logprobs, strict=True), start=1)
    ]
    chosen: dict[int, list[int]] = {}
    for _, index, position in sorted(changes)[:TOKENS]:
        chosen.setdefault(index, []).append(position)
    return [_probe(now[index], before[index], sorted(positions)) for index, positions in sorted(chosen.items())]


def rounding_of(probes: Sequence[Probe], rounded_sequences: Sequence[ScoredSequence]) -> float:
    """Root mean square difference between these sequences' logprobs and the probes', on the probes' tokens."""
    by_tokens = {tuple(sequence.token_ids): sequence.logprobs for sequence in rounded_sequences}
    squares = [
        (by_tokens[tuple(probe.token_ids)][position - 1] - logprob) ** 2
        for probe in probes
        for position, logprob in zip(probe.positions, probe.logprobs, strict=True)
    ]
    return math.sqrt(math.fsum(squares) / len(squares))


def tensor_digests(folder: Path, files: Iterable[Path] | None = None) -> list[TensorDigest]:
    """The digest of every tensor in the folder's safetensors, or in these files of it, by name."""
    paths = sorted(folder.glob("*.safetensors") if files is None else files)
    with ExitStack() as stack, ThreadPoolExecutor(_THREADS) as pool:
        files = [stack.enter_context(safe_open(path, framework="pt")) for path in paths]
        names = sorted((name, index) for index, file in enumerate(files) for name in file.keys())  # noqa: SIM118
        return list(pool.map(lambda place: _digest(place[0], files[place[1]].get_tensor(place[0])), names))


@contextmanager
def rounded(model: nn.Module, published: torch.dtype, compute: torch.dtype) -> Iterator[None]:
    """A context in which the model's forward has its weights rounded to `published`, and computes in `compute`.

    One module's weights are rounded at a time, while it runs: there is no second copy of the model.
    """
    masters: dict[nn.Module, dict[str, Tensor]] = {}

    def enter(module: nn.Module, _: object) -> None:
        masters[module] = {name: parameter.data for name, parameter in module.named_parameters(recurse=False)}
        for parameter in module.parameters(recurse=False):
            parameter.data = parameter.data.to(published).to(compute)

    def leave(module: nn.Module, *_: object) -> None:
        for name, data in masters.pop(module).items():
            module.get_parameter(name).data = data

    with ExitStack() as stack:
        for module in model.modules():
            if any(True for _ in module.parameters(recurse=False)):
                stack.callback(module.register_forward_pre_hook(enter).remove)
                stack.callback(module.register_forward_hook(leave, always_call=True).remove)
        yield


def _probe(sequence: ScoredSequence, before: ScoredSequence | None, positions: list[int]) -> Probe:
    return Probe(
        token_ids=sequence.token_ids,
        positions=positions,
        logprobs=[sequence.logprobs[position - 1] for position in positions],
        previous=[] if before is None else [before.logprobs[position - 1] for position in positions],
    )


def _digest(name: str, tensor: Tensor) -> TensorDigest:
    types = (tensor.dtype, *_NARROWER.get(tensor.dtype, ()))
    digests = {str(dtype).removeprefix("torch."): _sha256(tensor.to(dtype)) for dtype in types}
    return TensorDigest(name=name, dtype=next(iter(digests)), sha256=digests)


def _sha256(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().data).hexdigest()
