"""Limits of sandboxed code."""

from pydantic import BaseModel, ConfigDict, Field


class SandboxSettings(BaseModel):
    """Limits of an interpreter, and the files that it can read."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    cpu_s: int = Field(default=600, ge=1)
    """CPU seconds of a process over its lifetime. A session's interpreter accumulates the seconds of all its calls."""
    memory_mb: int = Field(default=1024, ge=64)
    """Megabytes of address space of one process (beyond it: MemoryError) and of memory of all together (beyond it they
    are killed). Files in /tmp come on top, see `disk_mb`."""
    processes: int = Field(default=32, ge=4)
    """Processes and threads at a time, the sandbox's own two included."""
    disk_mb: int = Field(default=64, ge=1)
    """Megabytes of /tmp, the only writable folder: private to the interpreter and held in memory."""
    output_chars: int = Field(default=8000, ge=100)
    """Characters kept of a call's output, half from the start and half from the end."""
    python: str | None = None
    """Path of the interpreter, with its packages: a virtual environment with numpy, say. None is the one that runs this
    service, without any package."""
    read_only_paths: list[str] = Field(default_factory=list)
    """Additional files and folders that the code may read, at the same paths, such as data sets."""
    max_interpreters: int = Field(default=128, ge=1, le=4096)
    """Maximum interpreters on this replica. A call that needs one more is answered 429."""
    allow_unsandboxed: bool = False
    """If isolation is not available, run the code anyway: with limits and a deadline, but with this service's rights
    to files, network and processes. Only for code that you would run yourself."""
