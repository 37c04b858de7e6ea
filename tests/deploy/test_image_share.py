"""deploy/docker/inside/share.py: what two environments of an image have in common is there once."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "deploy/docker/inside/share.py"
LARGE = b"x" * 2_000_000


def test_large_files_that_both_environments_have_become_links_and_nothing_else_changes(tmp_path: Path):
    mine, theirs = tmp_path / "mine", tmp_path / "other"
    files = {"same.so": LARGE, "changed.so": LARGE, "small.py": b"x", "alone.so": LARGE}
    for name, content in files.items():
        for environment in (mine, theirs):
            (environment / "lib").mkdir(parents=True, exist_ok=True)
            (environment / "lib" / name).write_bytes(content)
    (theirs / "lib" / "changed.so").write_bytes(LARGE[:-1] + b"y")
    (theirs / "lib" / "alone.so").unlink()
    (mine / "lib" / "link.so").symlink_to("same.so")

    done = subprocess.run([sys.executable, SCRIPT, mine, theirs], capture_output=True, text=True, check=True)

    links = {path.name: path.readlink() for path in (mine / "lib").iterdir() if path.is_symlink()}
    assert done.stdout == f"1 files, 0.0 GB, are links from {mine} into {theirs}\n"
    assert links == {"same.so": theirs / "lib" / "same.so", "link.so": Path("same.so")}
    assert {name: (mine / "lib" / name).read_bytes() for name in files} == files
