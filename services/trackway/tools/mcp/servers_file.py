"""The servers file that MCP clients share: `{"mcpServers": {"<name>": {"url": ..} | {"command": ..}}}`.

`${NAME}` and `${NAME:-default}` in any value are replaced from the environment, so that the file needs no tokens.
"""

import json
import re
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, SecretStr, ValidationError, model_validator

from trackway.tools.user_files import UserEntry, filled, problems_of

_ENVIRONMENT = re.compile(r"\$\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>[^}]*))?\}")


class McpServer(UserEntry):
    """A server: reached by `url` (streamable HTTP), or started by `command` (stdio)."""

    type: Literal["http", "streamable-http", "streamable_http", "streamableHttp", "stdio"] | None = None
    """Written by other clients. Must match `url` or `command`."""
    url: str | None = None
    auth_token: SecretStr | None = None
    """Sent as `Authorization: Bearer ...`; verl's key."""
    headers: dict[str, SecretStr] = Field(default_factory=dict)
    """Sent with each request."""
    command: str | None = None
    args: list[str] = Field(default_factory=list)
    env: dict[str, SecretStr] = Field(default_factory=dict)
    """Added to PATH, HOME and the like: the process gets nothing else of this process's environment."""
    cwd: Path | None = None
    name_prefix: str = ""
    """Prefix of its tools' names, for servers whose tools have the same names."""

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if (self.url is None) is (self.command is None):
            raise ValueError("expected either 'url' (streamable HTTP) or 'command' (stdio), got both or none")
        if self.type is not None and (self.type == "stdio") is not (self.command is not None):
            raise ValueError(f"expected type 'stdio' for 'command' and 'http' for 'url', got {self.type!r}")
        alien = ("auth_token", "headers") if self.command is not None else ("args", "env", "cwd")
        unexpected = [name for name in alien if name in self.model_fields_set]
        if unexpected:
            raise ValueError(
                f"expected no {', '.join(unexpected)} for a server with {'command' if self.command else 'url'}"
            )
        return self

    @property
    def sent_headers(self) -> dict[str, str]:
        """The headers of each request, in clear text."""
        token = {"Authorization": f"Bearer {self.auth_token.get_secret_value()}"} if self.auth_token else {}
        return {**{name: value.get_secret_value() for name, value in self.headers.items()}, **token}

    @property
    def place(self) -> str:
        """The address for messages, without the query, which may hold a key."""
        return self.url.split("?")[0] if self.url is not None else f"command {self.command}"


def read_servers(path: Path, folder: Path) -> dict[str, McpServer]:
    """The servers of a file, by name. A relative path counts from the working directory, as in verl, or from `folder`.

    ValueError names the file and the server.
    """
    file = path if path.exists() else folder / path
    try:
        content = json.loads(file.read_text())
    except OSError as error:
        raise ValueError(f"expected a JSON file, got {str(path)!r} (also not in {folder}): {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{file}: expected JSON, got: {error}") from error
    servers = content.get("mcpServers") if isinstance(content, dict) else None
    if not isinstance(servers, dict) or not servers:
        raise ValueError(f'{file}: expected {{"mcpServers": {{"<name>": {{"url": ...}}}}}}, got no servers')
    return {str(name): _server(f"{file}, server {name!r}", raw) for name, raw in servers.items()}


def _server(where: str, raw: object) -> McpServer:
    try:
        return McpServer.model_validate(filled(raw, _ENVIRONMENT))
    except ValidationError as error:
        raise ValueError(f"{where}: {problems_of(error)}") from None
    except LookupError as error:
        raise ValueError(f"{where}: {error.args[0]}") from None
