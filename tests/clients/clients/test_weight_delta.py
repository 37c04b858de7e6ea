"""Deltas of weight files: exact to the bit, small where little changes, refused where they are damaged."""

import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import pytest

from trackway.clients import weight_delta
from trackway.clients.weight_delta import apply, encode
from trackway.wire.errors import ErrorCode, TrackwayError

WORDS = 100_000


@pytest.fixture
def old() -> np.ndarray:
    """The words of bfloat16 weights: their sign, exponent and first bits."""
    weights = np.random.default_rng(0).normal(0, 0.02, WORDS).astype(np.float32)
    return (weights.view(np.uint32) >> 16).astype(np.uint16)


def written(folder: Path, name: str, words: np.ndarray) -> Path:
    path = folder / name
    path.write_bytes(words.tobytes())
    return path


def step(words: np.ndarray, share: float) -> np.ndarray:
    """Words of which a share moved to a neighbour, up or down."""
    random = np.random.default_rng(1)
    moved = words.copy()
    places = random.choice(len(words), int(share * len(words)), replace=False)
    moved[places] += random.choice(np.array([1, 65535], np.uint16), len(places))
    return moved


@pytest.mark.parametrize("part", [1 << 22, 4096, 999])
@pytest.mark.parametrize("share", [0.0, 0.001, 0.04, 0.2])
def test_applied_to_its_base_a_delta_gives_the_new_file(
    old: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float, part: int
) -> None:
    monkeypatch.setattr(weight_delta, "_PART", part)
    new = step(old, share)
    base, delta = written(tmp_path, "base", old), tmp_path / "delta"

    assert encode(base, written(tmp_path, "new", new), delta)
    apply(delta, base)

    assert base.read_bytes() == new.tobytes()


def test_any_change_of_a_word_is_kept_to_the_bit(tmp_path: Path) -> None:
    words = [0x0000, 0x8000, 0x7FC0, 0x3F80, 0xFFFF, 0x0001]  # zeros, NaN, 1, all bits, the smallest
    pairs = [(a, b) for a in words for b in words]
    same = [0x3F80] * 200
    base = written(tmp_path, "base", np.array([*same, *(a for a, _ in pairs)], np.uint16))
    new = np.array([*same, *(b for _, b in pairs)], np.uint16)

    assert encode(base, written(tmp_path, "new", new), tmp_path / "delta")
    apply(tmp_path / "delta", base)

    assert base.read_bytes() == new.tobytes()


def test_a_changed_word_takes_about_a_byte(old: np.ndarray, tmp_path: Path) -> None:
    base = written(tmp_path, "base", old)

    assert encode(base, written(tmp_path, "new", step(old, 0.04)), tmp_path / "delta")

    assert 0.6 < (tmp_path / "delta").stat().st_size / (0.04 * WORDS) < 1.3


@pytest.mark.parametrize(
    ("base", "new"),
    [(b"1234", b"123456"), (b"123", b"124"), (b"", b""), (bytes(4000), bytes(range(1, 251)) * 16)],
    ids=["other size", "odd size", "empty", "all changed"],
)
def test_what_a_delta_cannot_be_small_for_leaves_no_file(tmp_path: Path, base: bytes, new: bytes) -> None:
    for name, content in (("base", base), ("new", new)):
        (tmp_path / name).write_bytes(content)

    assert not encode(tmp_path / "base", tmp_path / "new", tmp_path / "delta")

    assert not (tmp_path / "delta").exists()


@pytest.mark.parametrize("fault", ["cut", "garbled", "shorter base", "longer base"])
def test_a_damaged_delta_is_an_error_that_names_it(
    old: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setattr(weight_delta, "_PART", 4096)
    delta = tmp_path / "model.delta"
    encode(written(tmp_path, "base", old), written(tmp_path, "new", step(old, 0.1)), delta)
    content = delta.read_bytes()
    base = {"shorter base": old[:100], "longer base": np.concatenate((old, old))}.get(fault, old)
    delta.write_bytes({"cut": content[:-9], "garbled": content[:30] + bytes(99) + content[129:]}.get(fault, content))

    with pytest.raises(TrackwayError, match=r"expected model\.delta to apply to base, got") as raised:
        apply(delta, written(tmp_path, "base", base))

    assert raised.value.code is ErrorCode.WEIGHTS_CORRUPT


def bomb(count: int, plane: bytes) -> bytes:
    compressed = zlib.compress(plane)
    lengths = [len(compressed)] * 5
    return np.array([count, *lengths], "<u4").tobytes() + 5 * compressed


@pytest.mark.parametrize("count", [10, 2**32 - 1])
def test_a_delta_of_gigabytes_is_refused_before_it_is_read(tmp_path: Path, count: int) -> None:
    delta = tmp_path / "model.delta"
    delta.write_bytes(bomb(count, bytes(100_000_000)))

    tracemalloc.start()
    with pytest.raises(TrackwayError, match="11 bytes of 10 words" if count == 10 else "4294967295 changes of 100 "):
        apply(delta, written(tmp_path, "base", np.zeros(100, np.uint16)))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert peak < 2_000_000
