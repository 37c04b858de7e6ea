"""Downloads requirements.txt as wheels for a machine without a network: `python -m tests.gpu_check.bundle FOLDER`.

There: `pip install --no-index --no-deps --target FOLDER/site FOLDER/*.whl`, then, in a copy of the repository,
`PYTHONPATH=FOLDER/site:services:clients python -m tests.gpu_check`. Of its 57 MB pyarrow has 50; where Python has it
already, its wheel may be left out.
"""

import argparse
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
CONSTRAINTS = HERE.parents[1] / "constraints.txt"
ONLY_SOURCE = ("antlr4-python3-runtime",)
"""Pure Python, of which no wheel is published: built here."""
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")


def main() -> None:
    """Fill the folder, and say how large it is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", help="version of Python there; default 3.12")
    words = parser.parse_args()
    words.folder.mkdir(parents=True, exist_ok=True)
    names = [line for line in (HERE / "requirements.txt").read_text().splitlines() if line and line[0] != "#"]
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    target = ["--python-version", words.python, "--implementation", "cp", *platforms, "--only-binary=:all:"]
    published = [name for name in names if name not in ONLY_SOURCE]
    _pip("download", [*target, "--dest", str(words.folder), *published])
    _pip("wheel", ["--wheel-dir", str(words.folder), *ONLY_SOURCE])
    size = sum(file.stat().st_size for file in words.folder.glob("*.whl")) / 1e6
    print(f"{len(names)} wheels for Python {words.python} in {words.folder}, {size:.0f} MB\n{__doc__}")


def _pip(command: str, words: list[str]) -> None:
    pip = [sys.executable, "-m", "pip", command, "--quiet", "--no-deps", "--constraint", str(CONSTRAINTS)]
    subprocess.run([*pip, *words], check=True)


if __name__ == "__main__":
    main()
