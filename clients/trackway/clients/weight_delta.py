"""Difference between two versions of a file of weights, exact to the last bit.

bfloat16 has 8 bits of precision, so a step of RL's usual size leaves most values as they were, and moves the others to
a neighbour. A file is read as 16-bit words. A delta has, for each part of the file, the distances between its changed
words and the differences of their bit patterns, both compressed byte by byte: the high bytes are nearly all zero.

    part := number of changed words, lengths of the planes (uint32 each), planes (zlib)
"""

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from trackway.wire.errors import ErrorCode, TrackwayError

ENCODING = "words16"
SUFFIX = ".delta"
LARGEST_SHARE = 0.5
"""Share of a file's bytes. A larger delta is not worth the work of applying it."""
_DENSEST = 0.25
"""Share of changed words in a part that a delta cannot be small with: float32, or a large step."""
_PART = 1 << 22
"""Words of a part: 8 MB of the file."""
_GAP_PLANES, _VALUE_PLANES = 3, 2  # a distance is below 2 ** 24
_COUNTS = 1 + _GAP_PLANES + _VALUE_PLANES
_LEVEL = 1

Words = NDArray[np.uint16]
Bytes = NDArray[np.uint8]


def encode(base: Path, new: Path, delta: Path) -> bool:
    """Writes what changed from `base` to `new`. False, with no file left, where that is not small or not possible."""
    size = new.stat().st_size
    if size != base.stat().st_size or size % 2 or not size:
        return False
    old_words, new_words = np.memmap(base, "<u2", "r"), np.memmap(new, "<u2", "r")
    covered = written = 0
    with delta.open("wb") as file:
        for start in range(0, len(new_words), _PART):
            part = _encode_part(old_words[start : start + _PART], new_words[start : start + _PART])
            if part is None:
                break
            written += file.write(part)
            covered += min(_PART, len(new_words) - start)
    if covered == len(new_words) and written <= LARGEST_SHARE * size:
        return True
    delta.unlink()
    return False


def apply(delta: Path, target: Path) -> None:
    """Changes `target`, a copy of the delta's base, into the new file. Raises WEIGHTS_CORRUPT for another's delta."""
    words = np.memmap(target, "<u2", "r+")
    try:
        with delta.open("rb") as file:
            for start in range(0, len(words), _PART):
                _apply_part(file, words[start : start + _PART])
    except (ValueError, IndexError, zlib.error) as error:
        message = f"expected {delta.name} to apply to {target.name}, got {error}; publish a new version"
        raise TrackwayError(ErrorCode.WEIGHTS_CORRUPT, message) from error
    words.flush()


def _encode_part(old: Words, new: Words) -> bytes | None:
    places = np.flatnonzero(old != new)
    if len(places) > _DENSEST * len(new):
        return None
    gaps = np.diff(places, prepend=0).astype("<u4")
    moved = (new[places] - old[places]).view(np.int16)
    signed = ((moved << 1) ^ (moved >> 15)).astype("<u2")  # small numbers of either sign have a high byte of zero
    planes = [
        zlib.compress(plane.tobytes(), _LEVEL)
        for plane in (*_split(gaps.view(np.uint8), 4)[:_GAP_PLANES], *_split(signed.view(np.uint8), 2))
    ]
    counts = np.array([len(places), *map(len, planes)], "<u4")
    return counts.tobytes() + b"".join(planes)


def _apply_part(file: BinaryIO, words: Words) -> None:
    header = file.read(4 * _COUNTS)
    if len(header) != 4 * _COUNTS:
        raise ValueError("its end")
    count, *lengths = np.frombuffer(header, "<u4").tolist()
    if count > len(words):
        raise ValueError(f"{count} changes of {len(words)} words")
    planes = list(_planes(file, lengths, count))
    gaps, signed = np.zeros((count, 4), np.uint8), np.zeros((count, 2), np.uint8)
    for index, plane in enumerate(planes[:_GAP_PLANES]):
        gaps[:, index] = plane
    for index, plane in enumerate(planes[_GAP_PLANES:]):
        signed[:, index] = plane
    coded = signed.view("<u2").ravel()
    moved = (coded >> 1) ^ (-(coded & 1).astype(np.int16)).view(np.uint16)
    words[np.cumsum(gaps.view("<u4").ravel(), dtype=np.int64)] += moved


def _planes(file: BinaryIO, lengths: list[int], count: int) -> Iterator[Bytes]:
    for length in lengths:
        # One byte more than expected: a small plane could be of gigabytes.
        plane = np.frombuffer(zlib.decompressobj().decompress(file.read(length), count + 1), np.uint8)
        if len(plane) != count:
            raise ValueError(f"{len(plane)} bytes of {count} words")
        yield plane


def _split(flat: Bytes, width: int) -> list[Bytes]:
    """Byte `i` of every number, for each `i`."""
    return [flat[index::width] for index in range(width)]
