"""Who may call the services that a start brings up: refused before anything runs when it cannot work."""

from typing import Any

from pydantic_settings import SettingsError

from trackway.clients.token import TOKEN, token_or_environments
from trackway.serving import ServiceSettings
from trackway.serving.tokens import TokenTable
from trackway.system.user_error import UserError

LOOPBACK = "127.0.0.1"


def host_of(config: dict[str, Any]) -> str:
    """Where the services listen: what the Serve config says, else this machine only."""
    return config.get("http_options", {}).get("host", LOOPBACK)


def address_of(host: str) -> str:
    """The address at which this machine reaches what listens there."""
    return LOOPBACK if host == "0.0.0.0" else host


def check_access(config: dict[str, Any]) -> None:
    """Raise UserError for services that other machines reach without a token, and for tokens that our calls lack.

    `config` is complete; what it does not say of tokens comes from the environment, as it will for the services.
    """
    host, ours = host_of(config), token_or_environments()
    for application in config["applications"]:
        name, tokens = application["name"], _tokens_of(application)
        if tokens is None and host not in (LOOPBACK, "localhost"):
            raise UserError(
                f"http_options.host {host} is reached from other machines, and service {name} has no tokens; give "
                f"--tokens-file, or the host {LOOPBACK}"
            )
        if tokens is not None and (ours is None or tokens.find(ours.get_secret_value().encode()) is None):
            raise UserError(
                f"service {name} has tokens, and {TOKEN} is none of them; set it to one: services and commands call "
                "one another with it"
            )


def _tokens_of(application: dict[str, Any]) -> TokenTable | None:
    auth = application.get("args", {}).get("auth")
    try:
        return TokenTable.of((ServiceSettings() if auth is None else ServiceSettings(auth=auth)).auth)
    except (SettingsError, ValueError) as error:
        raise UserError(f"service {application['name']}: {error}") from error
