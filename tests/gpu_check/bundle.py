"""Download what `make gpu-check` needs for a machine without a network: `python -m tests.gpu_check.bundle FOLDER`.

The folder gets the checkout's commit, the wheels of all environments and the model, and README.txt with the commands
for that machine. `--only numbers` takes the wheels of requirements.txt alone (57 MB), for a machine that has PyTorch
and transformers.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from tests.gpu_check.__main__ import MODEL
from tests.gpu_check.steps import ROOT

HERE = Path(__file__).resolve().parent
CONSTRAINTS = ROOT / "constraints.txt"
PLATFORMS = [f"manylinux_2_{glibc}_x86_64" for glibc in range(39, 16, -1)] + ["manylinux2014_x86_64"]
ONLY_SOURCE = ("antlr4-python3-runtime", "yattag")
"""Pure Python, of which no wheel is published: built here."""
PACKAGES = {
    "trackway": [str(ROOT / "pyproject.toml"), "--extra", "dev", "--constraint", str(CONSTRAINTS)],
    "vllm": [str(ROOT / "deploy/docker/inside/vllm.txt"), "--no-deps"],
    "sglang": [str(ROOT / "tests/sglang/requirements.in")],
    "trl": ["-", "--constraint", str(CONSTRAINTS)],
}
"""By environment, the arguments of `uv pip compile`."""
ALSO = "trl==1.16.0\ntorch\ntransformers\npsutil\nuv\nhatchling\neditables\naxe-playwright-python==0.1.8\n"
"""TRL beside its own needs, and what installs Trackway."""
README = """tar xzf trackway.tar.gz && cd trackway
export UV_OFFLINE=1 UV_FIND_LINKS=$PWD/../wheels PIP_NO_INDEX=1 PIP_FIND_LINKS=$PWD/../wheels
make gpu-check PYTHON=python{python} ARGS="--model $PWD/../model"
# Send back build/gpu-check.json.
"""
NUMBERS = """pip install --no-index --no-deps --target site wheels/*.whl
tar xzf trackway.tar.gz && cd trackway
PYTHONPATH=../site:services:clients python -m tests.gpu_check --only numbers
"""


def main() -> None:
    """Fill the folder, and say how large it is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", choices=["numbers"])
    parser.add_argument("--python", default="3.11", help="version of Python there; default 3.11, that of the pins")
    words = parser.parse_args()
    wheels = words.folder / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    archive = words.folder / "trackway.tar.gz"
    _run("git", "-C", str(ROOT), "archive", "--prefix", "trackway/", "--output", str(archive.resolve()), "HEAD")
    if words.only:
        _download(HERE / "requirements.txt", wheels, words.python)
    else:
        for name, arguments in PACKAGES.items():
            _download(_resolved(words.folder / f"{name}.txt", arguments, words.python), wheels, words.python)
        _python("huggingface_hub.cli.hf", "download", MODEL, "--local-dir", str(words.folder / "model"))
    (words.folder / "README.txt").write_text(NUMBERS if words.only else README.format(python=words.python))
    size = sum(file.stat().st_size for file in words.folder.rglob("*") if file.is_file()) / 1e6
    print(f"{words.folder}: {size:.0f} MB, and README.txt says how to use it")


def _resolved(file: Path, arguments: list[str], python: str) -> Path:
    """The file, with the pins of an environment there."""
    target = ["--python-version", python, "--python-platform", "x86_64-manylinux_2_39", "--no-annotate", "--no-header"]
    command = [
        str(Path(sys.executable).parent / "uv"),
        "pip",
        "compile",
        "--quiet",
        "-o",
        str(file),
        *target,
        *arguments,
    ]
    subprocess.run(command, input=ALSO, text=True, check=True)
    return file


def _download(requirements: Path, wheels: Path, python: str) -> None:
    lines = [line for line in requirements.read_text().splitlines() if line and line[0] != "#"]
    names = [line for line in lines if not line.startswith(ONLY_SOURCE)]
    target = ["--python-version", python, "--implementation", "cp", "--only-binary=:all:"]
    target += [word for platform in PLATFORMS for word in ("--platform", platform)]
    pip = (
        ["--quiet", "--no-deps", "--constraint", str(CONSTRAINTS)]
        if requirements.parent == HERE
        else ["--quiet", "--no-deps"]
    )
    _python("pip", "download", *pip, *target, "--dest", str(wheels), *names)
    if source := [line for line in lines if line.startswith(ONLY_SOURCE)]:
        _python("pip", "wheel", *pip, "--wheel-dir", str(wheels), *source)


def _python(module: str, *words: str) -> None:
    _run(sys.executable, "-m", module, *words)


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
