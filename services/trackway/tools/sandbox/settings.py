"""What code in a sandbox may use."""

from pydantic import BaseModel, ConfigDict, Field


class SandboxSettings(BaseModel):
    """Bounds of one interpreter and what it sees of the machine."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    cpu_s: int = Field(default=600, ge=1)
    """CPU seconds of one process over its whole life; a session's interpreter counts all its calls."""
    memory_mb: int = Field(default=1024, ge=64)
    """Megabytes of address space of one process (beyond it: MemoryError) and of memory of all together (then they are
    ended). Files in /tmp come on top, see `disk_mb`."""
    processes: int = Field(default=32, ge=4)
    """Processes and threads at a time, the sandbox's own two included."""
    disk_mb: int = Field(default=64, ge=1)
    """Megabytes of /tmp, the only writable folder: private to the interpreter and held in memory."""
    output_chars: int = Field(default=8000, ge=100)
    """Characters of what one call prints that are kept, half from the start and half from the end."""
    python: str | None = None
    """Path of the interpreter, with its packages: a virtual environment with numpy, say. None is the one that runs this
    service, without any package."""
    read_only_paths: list[str] = Field(default_factory=list)
    """Further files and folders that the code may read, at the same paths: data sets, say."""
    max_interpreters: int = Field(default=128, ge=1, le=4096)
    """Interpreters that may live at once on this replica; a call that needs one more is answered 429."""
    allow_unsandboxed: bool = False
    """Where isolation is not available, run the code all the same: with limits and a deadline, but with this service's
    own rights to files, network and processes. Only for code that you would run yourself."""
