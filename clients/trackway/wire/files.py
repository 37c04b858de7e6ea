"""A stored or transferred file with the digest that its reader checks."""

from trackway.wire.base import WireReply


class FileDigest(WireReply):
    """One file and its expected digest."""

    name: str
    """Path relative to the folder of its manifest."""
    size: int
    """Bytes."""
    sha256: str
