"""Check of this machine for each part of Trackway, with remedies. Starts nothing. Needs only the base."""

import asyncio
import os
import shutil
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil
from pydantic import BaseModel

from trackway.deploy.local import preflight
from trackway.deploy.local.preflight import missing_packages
from trackway.deploy.local.settings import UpSettings
from trackway.system.process import UserError

DEMO_EXTRAS = ("tools", "reward", "agent", "rollout", "trainer", "deploy", "mlflow")
OTHER_EXTRAS = ("console", "weave", "wandb", "tensorboard")
PYTHONS = ((3, 11), (3, 14))
"""The first version that works, and the first that does not."""
DISK_GB = 2.0
SHARED_MEMORY_GB = 0.2


class Finding(BaseModel):
    """One thing that a part needs."""

    name: str
    ok: bool
    found: str
    remedy: str = ""
    """The way to get it. Empty when it is there."""
    demo: bool = False
    """`trackway demo` cannot run without it."""


class Examination(BaseModel):
    """All findings of one machine."""

    demo: bool
    """`trackway demo` can run here."""
    findings: list[Finding]


def examine(settings: UpSettings) -> Examination:
    """Every finding, for a demo with these settings."""
    findings = [
        _python(),
        *(_extra(extra, extra in DEMO_EXTRAS) for extra in (*DEMO_EXTRAS, *OTHER_EXTRAS)),
        *_gpu(settings),
        _template(str(settings.model_path)),
        _sandbox(),
        *_ports(settings),
        _memory(settings),
        _disk(settings.outputs),
        *_shared_memory(),
    ]
    return Examination(demo=all(finding.ok or not finding.demo for finding in findings), findings=findings)


def _python() -> Finding:
    first, beyond = PYTHONS
    found = f"{sys.version.split()[0]} ({sys.executable})"
    ok = first <= sys.version_info[:2] < beyond
    return Finding(name="Python", ok=ok, found=found, remedy="" if ok else "use Python 3.11 to 3.13", demo=True)


def _extra(extra: str, demo: bool) -> Finding:
    missing = missing_packages(extra)
    found = f"lacks {', '.join(missing)}" if missing else "installed"
    remedy = f"pip install 'trackway[{extra}]'" if missing else ""
    return Finding(name=f"trackway[{extra}]", ok=not missing, found=found, remedy=remedy, demo=demo)


def _gpu(settings: UpSettings) -> Iterator[Finding]:
    name = "torch and GPU"
    try:
        build = version("torch")
    except PackageNotFoundError:
        yield Finding(name=name, ok=True, found="no torch: needed by rollout and trainer only")
        return
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a library of the build is missing
        remedy = "install torch again, for this machine: `uv pip install --reinstall --torch-backend auto torch`"
        yield Finding(name=name, ok=False, found=f"torch {build} fails: {error}", remedy=remedy, demo=True)
        return
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    if names:
        yield Finding(name=name, ok=True, found=f"torch {build}; {', '.join(names)}")
        yield from _gpu_memory(str(settings.model_path), len(names))
    elif shutil.which("nvidia-smi") is None:
        yield Finding(name=name, ok=True, found=f"torch {build}; no GPU, everything runs on the CPU")
    else:
        remedy = "install the build for the GPU: `uv pip install --reinstall --torch-backend auto torch`"
        found = f"torch {build} finds no GPU, but nvidia-smi is there"
        yield Finding(name=name, ok=False, found=found, remedy=remedy)


def _gpu_memory(model: str, ranks: int) -> Iterator[Finding]:
    """Return whether the GPUs hold what the ranks of a learner need at least, with the default keys."""
    if missing_packages("trainer"):
        return
    from trackway.deploy.checks.gpu_memory import gib, gpu_memory
    from trackway.deploy.config.services_for_run import gpu_bytes
    from trackway.run_config import compose

    config = compose([f"actor_rollout_ref.model.path={model}", f"trackway.learner_ranks={ranks}"])
    memory = gpu_memory(config, {}, gpu_bytes(), download=False)
    if memory is None or memory.total is None:
        return
    held, ok = memory.learner.exact, memory.learner.exact <= memory.total
    remedy = (
        "set actor.fsdp_config.param_offload and optimizer_offload, train an adapter (model.lora_rank), or use more "
        "GPUs"
    )
    found = f"weights, gradients and moments of the policy take {gib(held)} of each GPU's {gib(memory.total)}"
    yield Finding(name="GPU memory", ok=ok, found=found, remedy="" if ok else remedy)


def _template(model: str) -> Finding:
    """Return whether the model can be offered tools. Its tokenizer is read, not its weights."""
    name = "chat template"
    if missing_packages("trainer"):
        return Finding(name=name, ok=True, found="not read: needs trackway[trainer]")
    from trackway.chat.tokenizer import template_support
    from trackway.deploy.checks.findings import Findings
    from trackway.deploy.checks.model import tokenizer_here

    findings = Findings()
    tokenizer = tokenizer_here(model, False, findings)
    lacks = template_support(tokenizer).lacks if tokenizer is not None else ""
    problems = [*findings.not_found, *findings.missing_here, *findings.wrong, *([lacks] if lacks else [])]
    if problems:
        found, _, remedy = problems[0].rpartition("; ")
        return Finding(name=name, ok=False, found=found or remedy, remedy=remedy if found else "", demo=True)
    found = findings.not_checked[0] if tokenizer is None else f"shows tools and their results ({model})"
    return Finding(name=name, ok=True, found=found, demo=True)


def _sandbox() -> Finding:
    name = "bubblewrap"
    if sys.platform != "linux":
        remedy = "run the tool `python` on Linux; everything else runs without it"
        return Finding(name=name, ok=False, found=f"{sys.platform} has no namespaces", remedy=remedy)
    if missing_packages("tools"):
        path = shutil.which("bwrap")
        remedy = "" if path else "apt-get install bubblewrap (for the tool `python`)"
        return Finding(name=name, ok=path is not None, found=path or "not on PATH", remedy=remedy)
    from trackway.tools.sandbox.interpreter import SandboxUnavailableError, launcher_for
    from trackway.tools.sandbox.process import SandboxSettings

    try:
        asyncio.run(launcher_for(SandboxSettings()))
    except SandboxUnavailableError as error:
        found, _, remedy = str(error).partition("; ")
        return Finding(name=name, ok=False, found=found, remedy=f"{remedy} (for the tool `python`)")
    return Finding(name=name, ok=True, found="isolates the code of the tool `python`")


def _ports(settings: UpSettings) -> Iterator[Finding]:
    for option, port in preflight.ports(settings).items():
        found, remedy = "free", ""
        try:
            preflight.check_port(option, port)
        except UserError as error:
            found, remedy = "in use", str(error).partition("; ")[2]
        yield Finding(name=f"port {port}", ok=not remedy, found=found, remedy=remedy, demo=True)


def _memory(settings: UpSettings) -> Finding:
    available = psutil.virtual_memory().available / 1e9
    ok = available >= settings.min_memory_gb
    remedy = "" if ok else f"close other programs until {settings.min_memory_gb:.0f} GB are free"
    return Finding(name="memory", ok=ok, found=f"{available:.1f} GB free", remedy=remedy, demo=True)


def _disk(outputs: Path) -> Finding:
    folder = next(path for path in [outputs.resolve(), *outputs.resolve().parents] if path.exists())
    free = shutil.disk_usage(folder).free / 1e9
    name = f"disk of {folder}"
    if not os.access(folder, os.W_OK):
        return Finding(name=name, ok=False, found="not writable", remedy="give a writable --outputs", demo=True)
    ok = free >= DISK_GB
    remedy = "" if ok else f"make room until {DISK_GB:.0f} GB are free, or give another --outputs"
    return Finding(name=name, ok=ok, found=f"{free:.1f} GB free", remedy=remedy, demo=True)


def _shared_memory() -> Iterator[Finding]:
    """Ray's object store. Without room it is a file in /tmp, and slower."""
    folder = Path("/dev/shm")
    if folder.exists():
        free = shutil.disk_usage(folder).free / 1e9
        ok = free >= SHARED_MEMORY_GB
        remedy = "" if ok else f"make room until {SHARED_MEMORY_GB:.1f} GB are free; in a container, --shm-size=1g"
        yield Finding(name="shared memory", ok=ok, found=f"{free:.1f} GB free in {folder}", remedy=remedy)
