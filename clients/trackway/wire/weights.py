"""Published weights: a folder per version with a manifest of digests, and `latest.json`, which names the newest."""

from enum import StrEnum
from typing import Literal, Self

from pydantic import Field, model_validator

from trackway.wire.base import RelativePath, WireReply

UpdateMode = Literal["keep", "wait", "abort"]
"""Requests in flight when weights change: they continue, finish first, or are aborted and continued."""
TransportName = Literal["store", "ipc"]
"""How tensors get from the learner to an engine: from the store's files, or the learner's GPU memory (CUDA IPC)."""
POLICIES = "policies"
"""Folder of the named policies, in the store of a service."""


def policy_url(url: str, name: str) -> str:
    """The URL of a policy's store, below the store of the service."""
    return f"{url.rstrip('/')}/{POLICIES}/{name}"


class FileDigest(WireReply):
    """One file and its expected digest."""

    name: RelativePath
    """Relative to the folder of its manifest."""
    size: int = Field(ge=0)
    """Bytes."""
    sha256: str


class TensorDigest(WireReply):
    """Digest of one published tensor: the sha256 of its bytes, row by row, in each type an engine may hold."""

    name: str
    dtype: str
    """The published dtype, in torch's names: `float32`, `bfloat16`."""
    sha256: dict[str, str]
    """Digests by dtype: as published, and rounded to each narrower one."""


class Probe(WireReply):
    """One sequence, and the logprobs of some of its tokens (temperature 1) under the published weights.

    They are computed in float32 from the weights in their published dtype.
    """

    token_ids: list[int]
    positions: list[int]
    """Positions of these tokens, ascending, from 1."""
    logprobs: list[float]
    """One per position."""
    previous: list[float] = Field(default_factory=list[float])
    """The same logprobs under the previous version. Empty if the publisher does not know them."""


class WeightProof(WireReply):
    """Evidence that distinguishes an engine with this version's weights from one with older, other or rounded ones."""

    digests: list[TensorDigest] = Field(default_factory=list[TensorDigest])
    probes: list[Probe] = Field(default_factory=list[Probe])
    previous_version: int | None = None
    """Version of `Probe.previous`."""
    dtype: str | None = None
    """Dtype of the published weights, in torch's names."""
    tolerance: float = 1e-3
    """Largest root mean square difference of a float32 engine's logprobs."""
    rounding: float | None = None
    """Root mean square change of the publisher's logprobs when computed in bfloat16."""

    @model_validator(mode="after")
    def _proves_something(self) -> Self:
        if not self.digests and not any(probe.positions for probe in self.probes):
            raise ValueError("expected digests or a probe with positions, got neither")
        return self


class Verdict(StrEnum):
    """The result of proving an engine's weights."""

    PROVEN = "proven"
    """Every tensor has its published digest."""
    ROUNDED = "rounded"
    """The logprobs match the new version up to rounding, and not the previous one."""
    INDISTINGUISHABLE = "indistinguishable"
    """The logprobs match the new version; rounding hides whether they also match the previous one."""
    STALE = "stale"
    """The engine still holds the previous version, or an older one."""
    WRONG = "wrong"
    """The engine holds neither version: a tensor is missing or swapped, or it serves another model."""

    @property
    def accepted(self) -> bool:
        """Return whether weights with this verdict are accepted."""
        return self not in (Verdict.STALE, Verdict.WRONG)


class WeightDelta(WireReply):
    """How a version is published that holds only what changed since another one."""

    base: int = Field(ge=0)
    """The version whose files are changed, which may be a delta too."""
    encoding: str
    files: list[FileDigest]
    """Published files: changes, as `<file>.delta`, and whole files. The others are the base's."""


class WeightManifest(WireReply):
    """The content of a version."""

    version: int = Field(ge=0)
    run: str
    files: list[FileDigest]
    """The version's files, as a replica loads them."""
    delta: WeightDelta | None = None
    """None: these files are published whole."""
    proof: WeightProof
    update_mode: UpdateMode | None = None
    """None: each rollout service's own."""


class LatestWeights(WireReply):
    """The content of `latest.json`, replaced atomically after the version's folder is complete."""

    version: int = Field(ge=0)
    run: str
    path: str
    """Folder of the version, relative to the store."""


class SharedMemory(WireReply):
    """A buffer of GPU memory for other processes, as PyTorch exports it by CUDA IPC. Bytes are in base64.

    It has plain values in place of PyTorch's pickle, so that reading it runs no code.
    """

    gpu: str
    """UUID of the GPU."""
    handle: str
    size: int = Field(ge=0)
    """Bytes of the buffer."""
    offset: int = Field(ge=0)
    """Bytes from the start of the exported allocation."""
    counter: str
    """Name of the counter of the buffer's users."""
    counter_offset: int
    event: str
    """Handle of the event after which the buffer is filled."""
    event_sync: bool


class OfferedTensors(WireReply):
    """Tensors that lie one after another at the start of a buffer."""

    names: list[str]
    dtype: str
    """Dtype of all of them, in torch's names."""
    shapes: list[list[int]]
    sizes: list[int]
    """Bytes of each."""
    memory: SharedMemory


class WeightOffer(WireReply):
    """The content of `offer.json`: where the learner's process has the tensors of a version, until it is withdrawn."""

    version: int = Field(ge=0)
    chunks: list[OfferedTensors]
