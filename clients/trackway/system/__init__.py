"""What every part does in one way: files that are replaced whole, storage errors, digests, text, logs."""

from trackway.system.digests import Difference, digests, find_difference
from trackway.system.files import append_line, atomic_write, remove_drafts, replacing
from trackway.system.logs import escape_log_records
from trackway.system.storage import StorageError, storage_problem, writing
from trackway.system.text import visible

__all__ = [
    "Difference",
    "StorageError",
    "append_line",
    "atomic_write",
    "digests",
    "escape_log_records",
    "find_difference",
    "remove_drafts",
    "replacing",
    "storage_problem",
    "visible",
    "writing",
]
