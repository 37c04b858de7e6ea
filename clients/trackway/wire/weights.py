"""Published weights: a folder per version with a digest manifest, and `latest.json` which names the newest."""

from pydantic import Field

from trackway.wire.base import WireReply


class WeightFile(WireReply):
    """One file of a version and what it must hash to."""

    name: str
    size: int
    sha256: str


class Canary(WireReply):
    """One fixed sequence and the logprobs the publisher's model gives its tokens 1..n-1 (temperature 1)."""

    token_ids: list[int]
    logprobs: list[float]
    tolerance: float = 1e-3


class WeightManifest(WireReply):
    """What a version consists of."""

    version: int = Field(ge=0)
    run: str
    files: list[WeightFile]
    canary: Canary | None = None


class LatestWeights(WireReply):
    """The content of `latest.json`, replaced atomically after the version's folder is complete."""

    version: int = Field(ge=0)
    run: str
    path: str
    """Folder of the version, relative to the store."""
