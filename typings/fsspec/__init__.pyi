# fsspec ships no types; this declares what Trackway calls.
from typing import Any

from fsspec import core as core
from fsspec.spec import AbstractFileSystem as AbstractFileSystem

def filesystem(protocol: str, **storage_options: Any) -> Any: ...
