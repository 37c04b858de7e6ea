from typing import Any

from fsspec.spec import AbstractFileSystem

def url_to_fs(url: str, **storage_options: Any) -> tuple[AbstractFileSystem, str]: ...
