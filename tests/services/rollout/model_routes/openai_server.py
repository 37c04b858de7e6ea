"""A real server in this process, a conversation to send, and what an answer holds beyond OpenAI's types."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI
from openai import BaseModel
from openai.types.chat import ChatCompletionMessage, ChatCompletionMessageParam

CHAT: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Say ok."}]


@contextmanager
def serving(app: FastAPI) -> Iterator[str]:
    """The root URL of the app on a free port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=5))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            while not server.started and thread.is_alive():
                time.sleep(0.01)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


def extra(reply: BaseModel) -> dict[str, Any]:
    """The fields that OpenAI does not have."""
    return reply.model_extra or {}


def calls(message: ChatCompletionMessage) -> list[tuple[str, str]]:
    """Names and arguments of the functions called."""
    found = [call.function for call in message.tool_calls or [] if call.type == "function"]
    return [(function.name, function.arguments) for function in found]
