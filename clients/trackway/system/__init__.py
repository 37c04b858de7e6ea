"""Helpers that all parts share: whole files, file locks, storage errors, digests, back-off, ports, text, logs."""

from trackway.system.backoff import Backoff
from trackway.system.digests import Difference, digests, find_difference, indexed_files
from trackway.system.files import (
    StorageError,
    append_line,
    atomic_write,
    log_tail,
    new_folder,
    remove_drafts,
    replacing,
    storage_problem,
    writing,
)
from trackway.system.locks import LockTaken, acquire_lock, locked
from trackway.system.logs import escape_log_records, visible
from trackway.system.ports import free_port
from trackway.system.secrecy import read_secret, refuse_inspection, secrets_in, without_secrets

__all__ = [
    "Backoff",
    "Difference",
    "LockTaken",
    "StorageError",
    "acquire_lock",
    "append_line",
    "atomic_write",
    "digests",
    "escape_log_records",
    "find_difference",
    "free_port",
    "indexed_files",
    "locked",
    "log_tail",
    "new_folder",
    "read_secret",
    "refuse_inspection",
    "remove_drafts",
    "replacing",
    "secrets_in",
    "storage_problem",
    "visible",
    "without_secrets",
    "writing",
]
