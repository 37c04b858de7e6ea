"""Runs the checks: `python -m tests.gpu_check [--report FILE]`. Exit status 1 when one fails."""

import argparse
import gc
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch

from tests.gpu_check.checks import CHECKS, subject
from tests.gpu_check.findings import Finding, Report
from tests.gpu_check.model import LARGE, SHAPES, SMALL
from tests.gpu_check.speed import measure

LARGE_NEEDS_GIB = 30
"""GPU memory for LARGE in float32 with its gradients, AdamW's moments and the logits of a micro-batch."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Check, print the report, and write it if a file is given; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda where there is one")
    parser.add_argument("--shape", choices=[*SHAPES], help="default: by the memory of the GPU; small on a CPU")
    parser.add_argument("--report", type=Path, help="write the report there too")
    words = parser.parse_args(arguments)
    device = torch.device(words.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    shape = SHAPES[words.shape or _fitting(device)]
    report = Report(device)
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        began = time.perf_counter()
        checked = subject(shape, root / "model", device)
        _say(report, f"batch of {shape.name}", began)
        for check, run in CHECKS.items():
            began = time.perf_counter()
            try:
                report.findings[check] = run(checked, root / check)
            except Exception as error:
                traceback.print_exc()
                report.findings[check] = [Finding("runs", "no error", f"{type(error).__name__}: {error}", False)]
            _free(device)
            _say(report, check, began)
        began = time.perf_counter()
        report.figures = {"model": f"{shape.name}, {shape.parameters / 1e6:.0f}M weights"}
        report.figures |= measure(shape, checked.folder, device)
        _say(report, "speed", began)
    print(report.page())
    if words.report is not None:
        words.report.write_text(report.page())
    return 0 if report.holds else 1


def _fitting(device: torch.device) -> str:
    if device.type != "cuda":
        return SMALL.name
    memory = torch.cuda.get_device_properties(device).total_memory / 2**30
    return (LARGE if memory >= LARGE_NEEDS_GIB else SMALL).name


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _say(report: Report, name: str, began: float) -> None:
    report.seconds[name] = time.perf_counter() - began
    print(f"{name}: {report.seconds[name]:.1f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
