"""Interpretation of MLflow tracking URIs: a server's address, or a database file on this machine."""

from pathlib import Path
from urllib.parse import unquote, urlsplit


def local_database(uri: str) -> Path | None:
    """The sqlite file of a local URI (`sqlite:///file.db`, a folder, `file:///folder`), None for a server's address.

    Raises:
        ValueError: anything else, or a folder in MLflow's old file format.
    """
    scheme, separator, rest = uri.partition(":")
    if scheme in ("http", "https"):
        return None
    if scheme == "sqlite":
        return _sqlite_file(uri)
    if scheme == "file":
        return _in_folder(Path(unquote(urlsplit(uri).path)))
    if separator and rest.startswith("//"):
        raise ValueError(
            f"MLFLOW_TRACKING_URI: expected http(s)://..., sqlite:///file.db or a folder, got {uri!r}; "
            f"run `mlflow server --backend-store-uri {uri}` and give its address"
        )
    return _in_folder(Path(uri))


def _sqlite_file(uri: str) -> Path:
    """Parse a URI as SQLAlchemy does: three slashes and a path, which is absolute when it begins with a fourth."""
    path = uri.removeprefix("sqlite:///").partition("?")[0]
    if path in ("", ":memory:") or not uri.startswith("sqlite:///"):
        raise ValueError(f"MLFLOW_TRACKING_URI: expected sqlite:///file.db, got {uri!r}: workers share a file only")
    return Path(path).expanduser().resolve()


def _in_folder(folder: Path) -> Path:
    folder = folder.expanduser().resolve()
    if folder.is_file():
        raise ValueError(f"MLFLOW_TRACKING_URI: expected a folder, got the file {folder}; write sqlite:///{folder}")
    if any(folder.glob("*/meta.yaml")):
        raise ValueError(
            f"{folder} holds runs in MLflow's old file format, which takes no spans; move them over with "
            f"`mlflow migrate-filestore --source {folder} --target sqlite:///{folder}.db` "
            f"and set MLFLOW_TRACKING_URI=sqlite:///{folder}.db"
        )
    return folder / "mlflow.db"
