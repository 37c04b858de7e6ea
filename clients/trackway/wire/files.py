"""A file that crosses machines or time, and the digest by which a reader knows it again."""

from trackway.wire.base import WireReply


class FileDigest(WireReply):
    """One file and what it must hash to."""

    name: str
    """Path relative to the folder of its manifest."""
    size: int
    """Bytes."""
    sha256: str
