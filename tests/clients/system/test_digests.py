import hashlib
from pathlib import Path

from trackway.system import Difference, digests, find_difference
from trackway.wire.weights import FileDigest


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_files_are_described_by_path_size_and_digest(tmp_path: Path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "c").write_bytes(b"one")
    (tmp_path / "a").write_bytes(b"")

    described = digests(tmp_path, [tmp_path / "b" / "c", tmp_path / "a"])

    assert described == [
        FileDigest(name="a", size=0, sha256=sha256(b"")),
        FileDigest(name="b/c", size=3, sha256=sha256(b"one")),
    ]
    assert find_difference(tmp_path, described) is None


def test_a_changed_and_a_missing_file_are_told(tmp_path: Path):
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(b"one")
    described = digests(tmp_path, tmp_path.iterdir())
    (tmp_path / "a").write_bytes(b"two")
    changed = find_difference(tmp_path, described)
    (tmp_path / "a").unlink()

    assert changed == Difference("a", sha256(b"one"), sha256(b"two"))
    assert find_difference(tmp_path, described) == Difference("a", sha256(b"one"), "no file")
