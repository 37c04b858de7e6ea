"""Verifies that an engine holds the published weights, from digests and logprobs.

Digests show for each tensor whether it is new, old, or neither, or only whether the load changed it. Otherwise the
engine's logprobs are compared with the new and the previous version's, on tokens where the two differ. With d the
difference between the versions, and e the difference between the engine and the old version,

    nearness = sum(d e) / sum(d d)

is 1 for the new weights and 0 for the old ones, whatever the size of d; independent rounding moves it by about
rounding / (d sqrt(tokens)). Its standard error is heteroscedasticity-consistent (HC3: MacKinnon and White 1985) and
widened, as tokens of a sequence share a part of their rounding. Above 1/8 nothing is decided by value. Below, four
errors around the nearness must exclude 1/4 for the new weights and 3/4 for the old. So n tokens distinguish versions
that differ by d > 12 rounding / sqrt(n): for 512 tokens and bfloat16's 0.02 that is 0.011. If the engine's type is
narrower than the published one, its rounding may be entirely along d, and d > 4 rounding is needed.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.weights import Probe, Verdict, WeightProof

_OLD, _NEW = 0.25, 0.75
"""Nearness up to which weights may be the old ones, and from which they may be the new ones."""
_ERRORS = 4.0
_LARGEST_ERROR = 0.125
_SHARED = 1.5
"""Errors of 48 loads of right and old weights were 1.4 standard errors (rms), as if tokens were half as many."""
_ROUNDINGS = 4.0
"""Engines' kernels differ from the publisher's, which measured its own rounding."""
_BFLOAT16 = 0.15
"""Used if the publisher did not measure it. Rounding moves a logprob by up to 0.055, a stale lm_head by 0.3."""
_SHOWN = 3


@dataclass(frozen=True)
class Judgement:
    """A verdict with its evidence."""

    verdict: Verdict
    reason: str
    tensors: int = 0
    """Number of tensors with the right digest."""
    tensors_published: int = 0
    tokens: int = 0
    """Number of tokens that the engine scored."""
    nearness: float | None = None
    """1 for the new version, 0 for the previous one, or None without a previous version."""
    error: float | None = None
    """Error of the nearness."""
    off: float = 0.0
    """Root mean square difference between the engine's logprobs and the new version's."""

    def summary(self) -> str:
        """A one-line summary for logs."""
        parts = [f"{self.tensors} of {self.tensors_published} tensors by digest"] if self.tensors_published else []
        if self.tokens:
            parts.append(f"{self.tokens} tokens off by {self.off:.2g}")
        if self.nearness is not None and self.error is not None:
            parts.append(f"nearness {self.nearness:.3g} +- {self.error:.2g}")
        return f"{self.verdict.value} ({', '.join(parts)})" if parts else self.verdict.value


@dataclass(frozen=True)
class HeldDigests:
    """Names of the tensors with a known digest: right, still old, or neither."""

    right: Sequence[str] = ()
    old: Sequence[str] = ()
    other: Sequence[str] = ()
    unchanged: int = 0
    """Number of right tensors that were right before the load, too."""
    published: int = 0
    moved: int = 0
    """Number of parameters that the load changed, where only that is known."""

    @property
    def complete(self) -> bool:
        """Return whether every published tensor is right."""
        return self.published > 0 and len(self.right) == self.published


@dataclass(frozen=True)
class _Answers:
    """The engine's logprobs on the probes' tokens, with the publisher's."""

    got: list[float] = field(default_factory=list)
    new: list[float] = field(default_factory=list)
    old: list[float] = field(default_factory=list)
    """The differences. Empty unless all are known."""


def compare_digests(
    held: Mapping[str, str], published: Mapping[str, str], before: Mapping[str, str] | None = None
) -> HeldDigests:
    """Classify tensors by digest. `before` has the digests of the weights held before the load."""
    before = before or {}
    right = [name for name in held if held[name] == published.get(name)]
    wrong = [name for name in held if name in published and held[name] != published[name]]
    old = [name for name in wrong if held[name] == before.get(name)]
    unchanged = sum(before.get(name) == published[name] for name in right)
    return HeldDigests(right, old, [name for name in wrong if name not in old], unchanged, len(published))


def judge(
    proof: WeightProof,
    dtype: str,
    scored: Sequence[Sequence[float]],
    digests: HeldDigests | None = None,
    before: Sequence[Sequence[float]] | None = None,
) -> Judgement:
    """The verdict on an engine that holds and computes in `dtype`.

    `scored` has its logprobs of tokens 1..n-1 of each probe, `before` those from before the load. A probe counts as far
    as it was scored. Logprobs equal to the last bit mean old weights, however little the versions differ, unless the
    engine's type is narrower than the published one and may hide the change.
    """
    digests = digests or HeldDigests()
    answers = _answers(proof.probes, scored)
    nearness, error = _nearness(answers, _noise(proof, dtype), narrower=proof.dtype not in (None, dtype))
    off = _rms(answers.got, answers.new)

    def judged(verdict: Verdict, reason: str) -> Judgement:
        return Judgement(
            verdict,
            reason,
            tensors=len(digests.right),
            tensors_published=digests.published,
            tokens=len(answers.got),
            nearness=nearness,
            error=error,
            off=off,
        )

    if digests.old and not (digests.other or digests.moved) and len(digests.right) == digests.unchanged:
        return judged(Verdict.STALE, f"{_names(digests.old)}: still as before the load")
    if digests.old or digests.other:
        parts = [f"{_names(digests.old)}: still as before the load"] if digests.old else []
        parts += [f"{_names(digests.other)}: other than published"] if digests.other else []
        return judged(Verdict.WRONG, "; ".join(parts))
    if not all(map(math.isfinite, answers.got)) or len(scored) != len(proof.probes):
        return judged(Verdict.WRONG, "not all of its logprobs are numbers")
    if not answers.got and (proof.probes or not digests.complete):
        shown = f"{len(digests.right)} of {len(proof.digests)} tensors by digest"
        return judged(Verdict.WRONG, f"it scored no token, and showed {shown}")
    bound = _bound(proof, dtype)
    fits = off <= bound  # False for NaN
    if digests.complete:
        if not fits:
            reason = f"its tensors are right, and its logprobs off by {off:.3g} (at most {bound:.3g}): another model"
            return judged(Verdict.WRONG, reason)
        return judged(Verdict.PROVEN, "every tensor has its digest")
    may_be_old = may_be_new = True
    measured = "no version before is known"
    if nearness is not None and error is not None:
        may_be_old = error > _LARGEST_ERROR or nearness - _ERRORS * error <= _OLD
        may_be_new = error > _LARGEST_ERROR or nearness + _ERRORS * error >= _NEW
        measured = f"nearness {nearness:.3g} +- {error:.2g} (new 1, old 0)"
    if fits and not may_be_old and may_be_new:
        return judged(Verdict.ROUNDED, measured)
    if _unchanged(answers, proof, dtype, scored, before):
        return judged(
            Verdict.STALE, f"its logprobs of {len(answers.got)} tokens are to the last bit as before the load"
        )
    if may_be_old and not may_be_new:
        if _rms(answers.got, answers.old) <= bound:
            return judged(Verdict.STALE, measured)
        return judged(Verdict.WRONG, f"{measured}, and not the version before: an older one's or another run's")
    if not may_be_old and not may_be_new:
        return judged(Verdict.WRONG, f"{measured}: some tensors are old")
    if not fits:
        return judged(Verdict.WRONG, f"its logprobs are off by {off:.3g} (at most {bound:.3g})")
    return judged(Verdict.INDISTINGUISHABLE, measured)


def require_accepted(judgement: Judgement, proof: WeightProof, version: int, folder: Path) -> Judgement:
    """Return the judgement. Raises WEIGHTS_STALE or WEIGHTS_CORRUPT unless it is accepted."""
    if judgement.verdict.accepted:
        return judgement
    detail = {"verdict": judgement.verdict.value, "tensors": judgement.tensors, "off": str(judgement.off)}
    if judgement.verdict is Verdict.STALE:
        before = "the version before" if proof.previous_version is None else f"version {proof.previous_version}"
        raise TrackwayError(
            ErrorCode.WEIGHTS_STALE,
            f"expected an engine with weights version {version} from {folder}, got one that still has {before} or an "
            f"older one: {judgement.reason}; restart the replica",
            **detail,
        )
    raise TrackwayError(
        ErrorCode.WEIGHTS_CORRUPT,
        f"expected an engine with weights version {version} from {folder}, got other weights: {judgement.reason}; "
        "publish the weights that the trainer scored, in full, lm_head.weight included",
        **detail,
    )


def _answers(probes: Sequence[Probe], scored: Sequence[Sequence[float]]) -> _Answers:
    answers = _Answers()
    for probe, logprobs in zip(probes, scored, strict=False):
        within = [place for place, position in enumerate(probe.positions) if position <= len(logprobs)]
        answers.got.extend(logprobs[probe.positions[place] - 1] for place in within)
        answers.new.extend(probe.logprobs[place] for place in within)
        answers.old.extend(probe.previous[place] for place in within if probe.previous)
    if len(answers.old) != len(answers.new):
        answers.old.clear()
    return answers


def _nearness(answers: _Answers, noise: float, *, narrower: bool) -> tuple[float, float] | tuple[None, None]:
    """The slope of the engine's change against the published one, through the origin, and its error."""
    change = [new - old for new, old in zip(answers.new, answers.old, strict=False)]
    size = math.fsum(d * d for d in change)
    if size == 0.0 or not math.isfinite(size) or not all(map(math.isfinite, answers.got)):
        return None, None
    moved = [got - old for got, old in zip(answers.got, answers.old, strict=True)]
    slope = math.fsum(d * e for d, e in zip(change, moved, strict=True)) / size
    variance = 0.0
    for d, e in zip(change, moved, strict=True):
        leverage = d * d / size
        if leverage > 1.0 - 1e-9:
            return slope, math.inf  # a single token says nothing about its own rounding
        variance += (d * (e - slope * d) / (1.0 - leverage)) ** 2
    along = 0.5 * math.sqrt(len(change)) if narrower else _SHARED
    return slope, max(_SHARED * math.sqrt(variance) / size, along * noise / math.sqrt(size))


def _unchanged(
    answers: _Answers,
    proof: WeightProof,
    dtype: str,
    scored: Sequence[Sequence[float]],
    before: Sequence[Sequence[float]] | None,
) -> bool:
    """Return whether the logprobs are bitwise unchanged although the versions differ in the engine's type."""
    if before is None or proof.dtype != dtype or not answers.old or answers.old == answers.new:
        return False
    return [*map(list, before)] == [*map(list, scored)]


def _noise(proof: WeightProof, dtype: str) -> float:
    return (proof.rounding or 0.0) if dtype == "bfloat16" else 0.0


def _bound(proof: WeightProof, dtype: str) -> float:
    if dtype != "bfloat16":
        return proof.tolerance
    return max(proof.tolerance, _BFLOAT16 if proof.rounding is None else _ROUNDINGS * proof.rounding)


def _rms(ours: Sequence[float], theirs: Sequence[float]) -> float:
    squares = [(a - b) ** 2 for a, b in zip(ours, theirs, strict=False)]
    return math.sqrt(math.fsum(squares) / len(squares)) if squares else 0.0


def _names(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
