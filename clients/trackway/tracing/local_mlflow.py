"""An MLflow URI as a server that takes spans."""


def server_uri(uri: str) -> str:
    """The address of the server behind an MLflow tracking URI, without a trailing slash."""
    if uri.startswith(("http://", "https://")):
        return uri.rstrip("/")
    raise NotImplementedError(uri)
