"""Requests to an interpreter and its replies, over a private socket. The other half is in repl.py."""

import asyncio
import secrets
import socket
import struct

from trackway.tools.sandbox.repl import READY

_ANSWERS = {b"y": True, b"n": False}


class ChannelError(Exception):
    """The other end is closed, or its data is invalid: code in the sandbox can write to it."""


async def ready(channel: socket.socket) -> None:
    """Wait for the interpreter's first message."""
    await _answer(channel, READY)


async def ask(channel: socket.socket, code: str) -> bool:
    """Run a cell of code. Returns whether it raised nothing."""
    token = secrets.token_bytes(len(READY))
    data = code.encode("utf-8", "surrogatepass")
    try:
        await asyncio.get_running_loop().sock_sendall(channel, struct.pack(">I", len(data)) + token + data)
    except OSError as error:
        raise ChannelError("it closed its channel") from error
    return await _answer(channel, token)


async def _answer(channel: socket.socket, token: bytes) -> bool:
    heard = b""
    while len(heard) <= len(token):
        try:
            more = await asyncio.get_running_loop().sock_recv(channel, len(token) + 1 - len(heard))
        except OSError as error:
            raise ChannelError("it closed its channel") from error
        if not more:
            raise ChannelError("it closed its channel")
        heard += more
    if heard[:-1] != token or heard[-1:] not in _ANSWERS:
        raise ChannelError("it wrote into its channel")
    return _ANSWERS[heard[-1:]]
