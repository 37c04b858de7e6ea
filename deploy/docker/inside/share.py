"""Inside the image: `share.py ENVIRONMENT OTHER`: large files that both have become links to OTHER's.

Trackway's environment and vLLM's both have torch for CUDA and NVIDIA's libraries, mostly in one version: some gigabytes
that a node would pull twice.
"""

import filecmp
import sys
from pathlib import Path

LARGE = 1_000_000
"""Bytes. What is smaller is not worth a link."""


def share(environment: Path, other: Path) -> tuple[int, int]:
    """Return how many files are links now, and the bytes of those that they replaced."""
    count = saved = 0
    for path in environment.rglob("*"):
        twin = other / path.relative_to(environment)
        if path.is_symlink() or not path.is_file() or path.stat().st_size < LARGE or not twin.is_file():
            continue
        if filecmp.cmp(path, twin, shallow=False):
            count, saved = count + 1, saved + path.stat().st_size
            path.unlink()
            path.symlink_to(twin)
    return count, saved


if __name__ == "__main__":
    files, size = share(Path(sys.argv[1]), Path(sys.argv[2]))
    print(f"{files} files, {size / 1e9:.1f} GB, are links from {sys.argv[1]} into {sys.argv[2]}")
