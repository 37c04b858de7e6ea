"""Engine and learner in this process, checked and measured: `python -m tests.gpu_check.numbers --device cuda`.

Print the findings and figures as JSON. Exit status 1 if a finding does not hold.
"""

import argparse
import gc
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from pydantic_core import to_json

from tests.gpu_check.checks import CHECKS, Finding, subject
from tests.gpu_check.model import LARGE, SHAPES, SMALL
from tests.gpu_check.speed import measure

LARGE_NEEDS_GIB = 30
"""GPU memory for LARGE in float32 with its gradients, AdamW's moments and the logits of a micro-batch."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Check, measure and print; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], required=True)
    parser.add_argument("--shape", choices=[*SHAPES], help="default: by the memory of the GPU; small on a CPU")
    words = parser.parse_args(arguments)
    device = torch.device(words.device)
    shape = SHAPES[words.shape or _fitting(device)]
    findings: dict[str, Sequence[Finding]] = {}
    seconds: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        checked = subject(shape, root / "model", device)
        for check, run in CHECKS.items():
            began = time.perf_counter()
            try:
                findings[check] = run(checked, root / check)
            except Exception as error:
                traceback.print_exc()
                findings[check] = [Finding("runs", "no error", f"{type(error).__name__}: {error}", False)]
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
            seconds[check] = round(time.perf_counter() - began, 1)
            print(f"{check}: {seconds[check]} s", file=sys.stderr, flush=True)
        figures = {"model": f"{shape.name}, {shape.parameters / 1e6:.0f}M weights"}
        figures |= measure(shape, checked.folder, device)
    holds = all(finding.holds for rows in findings.values() for finding in rows)
    page: dict[str, Any] = {check: [asdict(finding) for finding in rows] for check, rows in findings.items()}
    print(to_json({"holds": holds, "findings": page, "figures": figures, "seconds": seconds}).decode())
    return 0 if holds else 1


def _fitting(device: torch.device) -> str:
    if device.type != "cuda":
        return SMALL.name
    memory = torch.cuda.get_device_properties(device).total_memory / 2**30
    return (LARGE if memory >= LARGE_NEEDS_GIB else SMALL).name


if __name__ == "__main__":
    raise SystemExit(main())
