"""The model behind the gateways of `sessions.py`: recorded answers, as vLLM gives them, for an ASGI server.

`/v1/chat/completions` answers with text, tool calls, token ids and logprobs, `/inference/v1/generate` with the same ids
and logprobs. The file SESSIONS_SCRIPT has one answer of each for a conversation of 0, 1, 2, ... earlier answers.
"""

import json
import os
from pathlib import Path

from starlette.types import Receive, Scope, Send

_SCRIPT = json.loads(Path(os.environ["SESSIONS_SCRIPT"]).read_text())
CHAT = [json.dumps(answer).encode() for answer in _SCRIPT["chat"]]
GENERATE = json.dumps(_SCRIPT["generate"]).encode()
JSON = (b"content-type", b"application/json")


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """The recorded answer; `{}` to any other path, such as a health check."""
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    if scope["path"] == "/v1/chat/completions":
        answer = CHAT[body.count(b'"assistant"')]
    else:
        answer = GENERATE if scope["path"] == "/inference/v1/generate" else b"{}"
    length = (b"content-length", str(len(answer)).encode())
    await send({"type": "http.response.start", "status": 200, "headers": [JSON, length]})
    await send({"type": "http.response.body", "body": answer})
