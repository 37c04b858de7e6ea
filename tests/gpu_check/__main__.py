"""Run the steps and write the page: `python -m tests.gpu_check [--only NAMES] [--report FILE]`.

Exit status 1 if a step fails, 2 without the GPU that is asked for, such as under a driver that is too old.
"""

import argparse
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic_core import to_json

from tests.gpu_check.steps import ROOT, STEPS, run

VERSIONS = "import importlib.metadata as m, sys; print(*(f'{n} {m.version(n)}' for n in sys.argv[1:]), sep='; ')"
MODEL = "Qwen/Qwen2.5-0.5B-Instruct"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the chosen steps, write the page after each, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--only", help="names of steps, separated by semicolons", type=lambda text: text.split(";"))
    parser.add_argument("--model", help=f"folder or id of the model to train; default {MODEL}, on a CPU the tiny one")
    parser.add_argument("--report", type=Path, default=ROOT / "build/gpu-check.json")
    words = parser.parse_args(arguments)
    if unknown := sorted({*(words.only or [])} - {step.name for step in STEPS}):
        parser.error(f"--only: expected some of {'; '.join(step.name for step in STEPS)}, got {'; '.join(unknown)}")
    if words.device == "cuda" and (problem := without_gpu()):
        print(problem, file=sys.stderr)
        return 2
    gpus = torch.cuda.device_count() if words.device == "cuda" else 1
    suffix = "" if words.device == "cpu" else "-cuda"
    pythons = {name: str(ROOT / f".venv-{name}{suffix}/bin/python") for name in ("vllm", "sglang")}
    model = words.model or (MODEL if words.device == "cuda" else None)
    names = {**pythons, "model": f"actor_rollout_ref.model.path={model}" if model else ""}
    names["shape"] = "tiny" if words.device == "cpu" else "358m"
    page: dict[str, Any] = {"passed": False, "device": words.device, "machine": _machine(pythons), "steps": []}
    words.report.parent.mkdir(parents=True, exist_ok=True)
    for step in STEPS:
        if words.only and step.name not in words.only:
            continue
        if step.gpus > gpus:
            row: dict[str, Any] = {"step": step.name, "status": "skipped", "why": f"needs {step.gpus} GPUs, got {gpus}"}
        else:
            print(f"{step.name}: at most {step.minutes:g} minutes", file=sys.stderr, flush=True)
            folder = Path(tempfile.mkdtemp(prefix="gpu-check-"))
            row = run(step, folder, names, words.device)
            shutil.rmtree(folder, ignore_errors=True)
        print(f"{row['status']:9} {row.get('seconds', 0):6.0f} s  {step.name}", flush=True)
        page["steps"].append(row)
        page["passed"] = all(row["status"] in ("passed", "skipped") for row in page["steps"])
        words.report.write_bytes(to_json(page, indent=2))
    print(f"{words.report}: the page to send back")
    return 0 if page["passed"] else 1


def without_gpu() -> str | None:
    """Why this PyTorch sees no GPU, and the remedy; None if it sees one."""
    if torch.cuda.is_available():
        return None
    cuda, driver = torch.version.cuda, _output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    if cuda is None:
        return (
            f"expected a build of PyTorch for CUDA, got {torch.__version__}; run `make gpu-check`, or add --device cpu"
        )
    if driver is None:
        return "expected a GPU, got no answer of `nvidia-smi`; install NVIDIA's driver, or add --device cpu"
    return (
        f"expected NVIDIA's driver for CUDA {cuda} (580 or newer for 13, 525 for 12), got {driver.split()[0]}; "
        "update the driver"
    )


def _machine(pythons: dict[str, str]) -> dict[str, Any]:
    query = "--query-gpu=name,memory.total,driver_version,compute_cap"
    versions = {
        "trackway": [sys.executable, "torch", "transformers", "ray"],
        **{n: [p, n, "torch"] for n, p in pythons.items()},
    }
    return {
        "commit": _output(["git", "-C", str(ROOT), "rev-parse", "HEAD"]),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "gpus": (_output(["nvidia-smi", query, "--format=csv,noheader"]) or "").splitlines(),
        "links": _output(["nvidia-smi", "topo", "-m"]),
        **{name: _output([python, "-c", VERSIONS, *packages]) for name, (python, *packages) in versions.items()},
    }


def _output(command: list[str]) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


if __name__ == "__main__":
    raise SystemExit(main())
