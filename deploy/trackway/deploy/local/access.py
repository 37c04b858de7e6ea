"""Checks of hosts and tokens before services are started."""

from typing import Any

from pydantic_settings import SettingsError

from trackway.clients.http_client import TOKEN, resolve_token
from trackway.serving import ServiceSettings
from trackway.serving.auth import TokenTable
from trackway.system.process import UserError

LOOPBACK = "127.0.0.1"


def host_of(config: dict[str, Any]) -> str:
    """The address the services listen on: from the Serve config, else the loopback address."""
    return config.get("http_options", {}).get("host", LOOPBACK)


def address_of(host: str) -> str:
    """The address at which this machine reaches a server that listens on `host`."""
    return LOOPBACK if host == "0.0.0.0" else host


def check_access(config: dict[str, Any]) -> None:
    """Raise UserError if other machines can reach a service without a token, or if our own token is not accepted.

    `config` is a completed Serve config. Token settings that it omits come from the environment, as in the services.
    """
    host, ours = host_of(config), resolve_token()
    for application in config["applications"]:
        name, tokens = application["name"], _tokens_of(application)
        if tokens is None and host not in (LOOPBACK, "localhost"):
            raise UserError(
                f"http_options.host {host} is reachable from other machines, and service {name} has no tokens; give "
                f"--tokens-file, or set the host to {LOOPBACK}"
            )
        if tokens is not None and (ours is None or tokens.find(ours.get_secret_value().encode()) is None):
            raise UserError(
                f"service {name}: expected {TOKEN} to be one of its tokens, got another or none; set it to one of "
                "them, because services and commands use it for calls"
            )


def _tokens_of(application: dict[str, Any]) -> TokenTable | None:
    auth = application.get("args", {}).get("auth")
    try:
        return TokenTable.of((ServiceSettings() if auth is None else ServiceSettings(auth=auth)).auth)
    except (SettingsError, ValueError) as error:
        raise UserError(f"service {application['name']}: {error}") from error
