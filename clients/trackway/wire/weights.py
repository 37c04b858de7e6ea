"""Published weights: a folder per version with a digest manifest, and `latest.json` which names the newest."""

from enum import StrEnum

from pydantic import Field

from trackway.wire.base import WireReply
from trackway.wire.files import FileDigest


class Canary(WireReply):
    """One fixed sequence and the logprobs the publisher's model gives its tokens 1..n-1 (temperature 1)."""

    token_ids: list[int]
    logprobs: list[float]
    tolerance: float = 1e-3


class TensorDigest(WireReply):
    """Digest of one published tensor: the sha256 of its bytes, row by row, in each type an engine may hold."""

    name: str
    dtype: str
    """As published, in torch's words: `float32`, `bfloat16`."""
    sha256: dict[str, str]
    """By type: as published, and rounded to each narrower type."""


class Probe(WireReply):
    """One sequence, and the logprobs of some of its tokens (temperature 1) under the weights as they are published.

    They are computed in float32 from the weights in the type in which they are published.
    """

    token_ids: list[int]
    positions: list[int]
    """Positions of these tokens, ascending, from 1."""
    logprobs: list[float]
    """One for each position."""
    previous: list[float] = Field(default_factory=list)
    """The same logprobs under the version before; empty where the publisher does not know them."""


class WeightProof(WireReply):
    """Evidence that tells an engine with this version's weights from one with older, other or rounded ones."""

    digests: list[TensorDigest] = Field(default_factory=list)
    probes: list[Probe] = Field(default_factory=list)
    previous_version: int | None = None
    """The version that `Probe.previous` is of."""
    dtype: str | None = None
    """Of the published weights, in torch's words."""
    tolerance: float = 1e-3
    """Root mean square by which a float32 engine's logprobs may differ."""
    rounding: float | None = None
    """Root mean square by which computing in bfloat16 changed the publisher's own logprobs of the probes."""


class Verdict(StrEnum):
    """What is known of the weights that an engine holds."""

    PROVEN = "proven"
    """Every tensor has the digest that was published."""
    ROUNDED = "rounded"
    """The answers are those of the new version up to rounding, and not those of the version before."""
    INDISTINGUISHABLE = "indistinguishable"
    """The answers fit the new version; rounding hides whether they fit the version before, too."""
    STALE = "stale"
    """The engine still holds the version before, or an older one."""
    WRONG = "wrong"
    """It holds neither version: a part of the new one, other weights, or it computes another model."""

    @property
    def accepted(self) -> bool:
        """Whether weights of this verdict may serve."""
        return self not in (Verdict.STALE, Verdict.WRONG)


class WeightManifest(WireReply):
    """What a version consists of."""

    version: int = Field(ge=0)
    run: str
    files: list[FileDigest]
    canary: Canary | None = None
    """For replicas of a release without `proof`."""
    proof: WeightProof | None = None


class LatestWeights(WireReply):
    """The content of `latest.json`, replaced atomically after the version's folder is complete."""

    version: int = Field(ge=0)
    run: str
    path: str
    """Folder of the version, relative to the store."""
