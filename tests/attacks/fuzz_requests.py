"""Requests drawn from a seed: what a service's OpenAPI document allows, and hostile changes of it.

A request is a function of the seed, of its number and of the ids that earlier answers gave.
"""

import gzip
import json
import random
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

Json = Any
Header = tuple[bytes, bytes]

WELL_FORMED = "well formed"
DEEPEST = 6
"""Levels of a drawn body; deeper ones get what is required alone."""
_MARK = "@@%d@@"
TIMEOUT = b"x-request-timeout"


class Operation(NamedTuple):
    """A route of a service."""

    method: str
    path: str
    body: Json = None
    """JSON schema; None without a body."""
    query: tuple[str, ...] = ()
    media: str = "application/json"
    """Type of the body. A body of another type than JSON is text all the same."""


class FuzzRequest(NamedTuple):
    """The bytes to send, in the pieces in which they are sent."""

    pieces: tuple[bytes, ...]
    tricks: tuple[str, ...]
    """How it differs from a valid request."""
    whole: bool
    """Whether HTTP requires an answer; otherwise the connection may be closed without one."""
    body_bytes: int

    def __str__(self) -> str:
        start = b"".join(self.pieces)[:600]
        return f"{', '.join(self.tricks) or WELL_FORMED}: {start!r}"


HINTS: dict[str, Sequence[Json]] = {
    "model": ["policy"],
    "role": ["user", "user", "assistant", "system", "tool"],
    "type": ["text", "function", "message", "json_object", "json_schema", "input_text", "tool_use", "tool_result"],
    "content": ["1+1?", "", "a <tool_call> b", [{"type": "text", "text": "hi"}]],
    "prompt": ["1+1?", [1, 2, 3], [{"role": "user", "content": "1+1?"}]],
    "input": ["1+1?", [{"role": "user", "content": "1+1?"}]],
    "messages": [[{"role": "user", "content": "1+1?"}]],
    "token_ids": [[5, 6, 7], [0], [479]],
    "prompt_ids": [[5, 6, 7]],
    "data_source": ["openai/gsm8k"],
    "ground_truth": ["2"],
    "solution_str": ["#### 2"],
    "sample": [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": "1+1?"}],
            "reward_model": {"ground_truth": "2"},
        }
    ],
    "agent_name": ["tool_agent", "single_turn_agent"],
    "tool": ["calc_gsm8k_reward", "calculator"],
    "name": ["calculator", "calc_gsm8k_reward"],
    "arguments": [{"expression": "1+1"}, {"answer": "2"}, '{"expression": "1+1"}'],
    "create_kwargs": [{"ground_truth": "2"}],
    "trajectory_ids": [["a"], ["a", "b"]],
    "actions": [["<tool_call>{}</tool_call>"], ["a", "b"]],
    "config": [{"data": {"train_files": "none.parquet"}}, {"trainer": {"total_epochs": 1}}, ["trainer.total_epochs=1"]],
    "stop": ["\n", ["a", "b"]],
    "temperature": [0.0, 0.5, 1.0],
    "top_p": [0.5, 1.0],
    "n": [1, 2],
    "timeout_s": [1.0],
    **{name: [1, 4] for name in ("max_tokens", "max_new_tokens", "max_completion_tokens", "max_output_tokens")},
    **{name: [4, 8] for name in ("max_response_length", "max_turns", "max_assistant_turns")},
}
"""Values by which a drawn body gets past the schema, by the name of the field."""

NUMBERS = (
    *(b"1e308", b"-1e308", b"1e400", b"-1e400", b"1e-38", b"5e-324", b"1e39", b"3.5e38", b"NaN", b"Infinity"),
    *(b"-Infinity", b"-0", b"0", b"-1", b"1.5", b"2147483648", b"-2147483649", b"9223372036854775808", b"1e18"),
    *(b"18446744073709551616", b"9" * 300, b"9" * 999, b"-" + b"9" * 400, b"1" + b"0" * 1000, b"1e99999999999"),
)
OTHER_TYPES = (
    *(b"null", b"true", b"false", b'""', b'" "', b'"x"', b"[]", b"{}", b"[[]]", b"[null]", b"[{}]", b'{"":""}'),
    *(b'["a"]', b'"1"', b'{"type":"object"}', b'{"$ref":"#"}', b'{"a":{"$ref":"#/a"}}', b"[1,2,3]", b"[-1]"),
)
TEXTS = (
    *(rb'"\ud800"', rb'"\u0000"', rb'"a\u0000b"', '"\N{RIGHT-TO-LEFT OVERRIDE}\N{GRINNING FACE}"'.encode()),
    *(b'"\xff\xfe"', b'"\xc0\xaf"', b'"\xed\xa0\x80"', rb'"\r\nset-cookie: a"', rb'"\u2028\u2029"', rb'"\ufeff"'),
    *(b'"../../../etc/passwd"', b'"/etc/passwd"', b'"file:///etc/passwd"', b'"a/../../b"', b'"CON"', b'"%2e%2e%2f"'),
    *(b'"{{7*7}}{% for x in range(9999999) %}a{% endfor %}"', b'"${oc.env:PATH}"', b'"${a}"', b'"%s%n%d"', b'"{0.a}"'),
    *(b'"9**9**9**9"', b'"((((1))))"', b'"1e999999999"', b"\"__import__('os').system('id')\"", b'"(a+)+$"'),
    *(b'"(((((a{1,99}){1,99}){1,99}){1,99}){1,99})"', b'"\' OR 1=1 --"', b'"<script>alert(1)</script>"'),
    *(b'"<tool_call>{"', b'"</tool_call><tool_call>"', b'"<|im_end|><|im_start|>system"', b'"data: [DONE]"'),
)
DEPTHS = (10, 60, 130, 260, 600, 950, 3000, 20_000, 100_000)
LENGTHS = (63, 64, 65, 128, 129, 255, 256, 257, 511, 512, 513, 1024, 1025, 4096, 4097, 65_536, 65_537, 300_000)

PATHS: tuple[Callable[[bytes], bytes], ...] = (
    lambda path: path + b"/",
    lambda path: b"/" + path,
    lambda path: path + b"/../../..",
    lambda path: path + b"%00",
    lambda path: path + b"/%2e%2e/%2e%2e/etc/passwd",
    lambda path: path + b"%252e%252e%252f",
    lambda path: path + b"%ff%fe",
    lambda path: path + b"\xff\xc3",
    lambda path: path + b";a=b",
    lambda path: path + b"?" + b"a=b&" * 5000,
    lambda path: path + b"?tags=" + b"9" * 3000,
    lambda path: path + b"/" + b"a" * 30_000,
    lambda path: b"http://169.254.169.254" + path,
    lambda path: path.upper(),
    lambda path: path.replace(b"/", b"\\"),
    lambda path: path.replace(b"/", b"%2f"),
    lambda path: b"*",
    lambda path: b"/..",
)
METHODS = (b"GET", b"HEAD", b"PUT", b"PATCH", b"DELETE", b"OPTIONS", b"TRACE", b"POST", b"QUERY", b"post", b"CONNECT")

HEADERS: tuple[tuple[Header, ...], ...] = (
    *(
        ((TIMEOUT, value),)
        for value in (b"0", b"0.001", b"999999999999", b"nan", b"inf", b"-1", b"1e9", b"", b"1" * 40, b"\xff", b"1,1")
    ),
    ((TIMEOUT, b"1"), (TIMEOUT, b"0.5")),
    *(
        ((b"traceparent", value),)
        for value in (
            *(b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", b"", b"00-" + b"0" * 32 + b"-" + b"0" * 16),
            *(b"ff-" + b"f" * 32 + b"-" + b"f" * 16 + b"-ff", b"a" * 8000, b"\xff\xfe", b"00-xyz-abc-01"),
        )
    ),
    ((b"traceparent", b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),) * 2,
    ((b"tracestate", b",".join(b"k%d=v" % n for n in range(900))),),
    ((b"baggage", b",".join(b"k%d=%%00v;p=1" % n for n in range(900))),),
    *(
        ((b"content-type", value),)
        for value in (
            *(b"", b"text/plain", b"application/x-www-form-urlencoded", b"multipart/form-data", b"a" * 5000, b"\xff"),
            *(b"multipart/form-data; boundary=a", b"application/json; charset=utf-16", b"application/json; charset=x"),
        )
    ),
    *(((b"content-encoding", value),) for value in (b"gzip", b"deflate", b"br", b"gzip, gzip", b"x")),
    *(((b"accept", value),) for value in (b"", b"text/event-stream", b"a/b;q=x", b"*/*" + b",a/b" * 3000)),
    *(((b"idempotency-key", value),) for value in (b"k", b"", b"k" * 257, b"\xe9", b"a\tb")),
    *(((b"x-session-id", value),) for value in (b"s", b"", b"s" * 257, b"../..", b"\xff")),
    *(
        ((b"authorization", value),)
        for value in (b"Bearer", b"Bearer " + b"a" * 9000, b"Basic !!", b"\xff", b"Bearer \0")
    ),
    *(((b"host", value),) for value in (b"", b"a" * 5000, b"evil.example", b"[::1", b"a:99999999", b"\xff")),
    *(((b"last-event-id", value),) for value in (b"-1", b"9" * 50)),
    *(((b"mcp-session-id", value),) for value in (b"0" * 32, b"\xff", b"a" * 5000)),
    *(((b"mcp-protocol-version", value),) for value in (b"1", b"9999-99-99")),
    ((b"x-api-key", b"\xff"),),
    ((b"anthropic-version", b"a" * 5000),),
    ((b"expect", b"100-continue"),),
    ((b"range", b"bytes=0-18446744073709551615"),),
    (
        (b"connection", b"upgrade"),
        (b"upgrade", b"websocket"),
        (b"sec-websocket-key", b"a"),
        (b"sec-websocket-version", b"13"),
    ),
    ((b"connection", b"upgrade, http2-settings"), (b"upgrade", b"h2c"), (b"http2-settings", b"")),
    (
        (b"forwarded", b'for="_x";by="' + b"a" * 3000 + b'"'),
        (b"x-forwarded-for", b"\xff"),
        (b"x-forwarded-proto", b"x"),
    ),
    tuple((b"x-%d" % n, b"a" * 50) for n in range(400)),
    ((b"cookie", b"a=b; " * 3000),),
    ((b"sec-fetch-site", b"cross-site"), (b"origin", b"null")),
)


def request(operations: Sequence[Operation], known: Mapping[str, Sequence[str]], draw: random.Random) -> FuzzRequest:
    """A valid request, or one with one to three hostile changes."""
    operation = draw.choice(operations)
    tricks: list[str] = []
    body = b"" if operation.body is None else _body(operation.body, draw, tricks)
    path = _path(operation, known, draw)
    headers = [(b"host", b"localhost"), (TIMEOUT, b"1"), (b"accept", b"application/json, text/event-stream")]
    headers += [(b"content-type", operation.media.encode())] if body else []
    if path.startswith("/v1") and known.get("api_key"):
        headers.append((b"authorization", b"Bearer " + draw.choice(known["api_key"]).encode()))
    method, target = operation.method.encode(), path.encode()
    if draw.random() < 0.2:
        tricks.append("headers")
        extra = draw.choice(HEADERS)
        headers = [header for header in headers if header[0] not in dict(extra)] + list(extra)
    if draw.random() < 0.05:
        tricks.append("path")
        target = draw.choice(PATHS)(target)
    if draw.random() < 0.03:
        tricks.append("method")
        method = draw.choice(METHODS)
    head = b"".join(b"%s: %s\r\n" % header for header in headers)
    start = b"%s %s HTTP/1.1\r\n%s" % (method, target, head)
    framed, whole = _framed(start, body, draw, tricks)
    is_odd = bool({"headers", "path", "method"} & set(tricks))
    return FuzzRequest(framed, tuple(tricks), whole and not is_odd, len(body))


def _framed(start: bytes, body: bytes, draw: random.Random, tricks: list[str]) -> tuple[tuple[bytes, ...], bool]:
    """The request in pieces, and whether an answer must follow."""
    sized = start + b"content-length: %d\r\n\r\n" % len(body)
    if draw.random() < 0.93:
        return (sized + body,), True
    framing = draw.choice(
        ("chunked", "dripped", "short", "bad length", "bad chunk", "two lengths", "both", "pipelined")
    )
    tricks.append(framing)
    chunked = start + b"transfer-encoding: chunked\r\n\r\n"
    cut = [body[at : at + max(1, len(body) // 7)] for at in range(0, len(body), max(1, len(body) // 7))]
    chunks = tuple(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in cut)
    match framing:
        case "chunked":
            return (chunked, *chunks, b"0\r\n\r\n"), True
        case "dripped":
            return (sized[:9], sized[9:], *cut), True
        case "short":
            return (start + b"content-length: %d\r\n\r\n" % (len(body) + 10) + body,), False
        case "bad length":
            length = draw.choice((b"-1", b"1e9", b"99999999999999999999", b"0x10", b"", b"+5", b"5, 5"))
            return (start + b"content-length: " + length + b"\r\n\r\n" + body,), False
        case "bad chunk":
            chunk = draw.choice(
                (b"-1\r\na\r\n", b"zz\r\n", b"ffffffffffffffffff\r\na", b"5;" + b"a" * 20_000 + b"\r\n")
            )
            return (chunked, chunk), False
        case "two lengths":
            return (start + b"content-length: 0\r\ncontent-length: %d\r\n\r\n" % len(body) + body,), False
        case "both":
            return (start + b"content-length: 3\r\ntransfer-encoding: chunked\r\n\r\n" + b"".join(chunks),), False
        case _:
            return (sized + body + sized + body,), False


def _path(operation: Operation, known: Mapping[str, Sequence[str]], draw: random.Random) -> str:
    parts: list[str] = []
    for part in operation.path.split("/"):
        name = part.strip("{}")
        given = known.get(name) or HINTS.get(name) or ("none",)
        parts.append(draw.choice(given) if part.startswith("{") else part)
    query = [f"{name}={draw.choice(('true', '1', 'a', '-1', '', 'keep', '%00'))}" for name in operation.query]
    return "/".join(parts) + ("?" + "&".join(query) if query and draw.random() < 0.5 else "")


def _body(schema: Json, draw: random.Random, tricks: list[str]) -> bytes:
    value = _value(schema, draw, 0)
    changes = draw.choice((0, 1, 1, 1, 1, 2, 3))
    raws: list[bytes] = []
    for _ in range(changes):
        value = _changed(value, draw, raws, tricks)
    text = json.dumps(value).encode()
    for number, raw in enumerate(raws):
        text = text.replace(json.dumps(_MARK % number).encode(), raw, 1)
    if draw.random() < 0.06:
        trick, change = draw.choice(_BODIES)
        tricks.append(trick)
        return change(text)
    return text


@cache
def _gzip_bomb() -> bytes:
    return gzip.compress(b"[" * 20_000_000, 1, mtime=0)


_BODIES: tuple[tuple[str, Callable[[bytes], bytes]], ...] = (
    ("empty body", lambda body: b""),
    ("cut body", lambda body: body[: len(body) // 2]),
    ("more behind the body", lambda body: body + b"}]x"),
    ("two bodies", lambda body: body + body),
    ("byte order mark", lambda body: b"\xef\xbb\xbf" + body),
    ("UTF-16", lambda body: body.decode(errors="replace").encode("utf-16")),
    ("bytes", lambda body: bytes(range(256)) * 20),
    ("form", lambda body: b"a=b&c=d"),
    ("gzip", lambda body: gzip.compress(body, mtime=0)),
    ("gzip bomb", lambda body: _gzip_bomb()),
    ("list", lambda body: b"[" + body + b"]"),
    ("spaces", lambda body: b" " * 200_000 + body),
    ("comment", lambda body: b"/* a */" + body),
)


def _changed(value: Json, draw: random.Random, raws: list[bytes], tricks: list[str]) -> Json:
    """The value with one part replaced, removed or doubled."""
    if isinstance(value, dict) and value and draw.random() < 0.9:
        name = draw.choice(list(value))
        how = draw.random()
        if how < 0.07:
            tricks.append(f"without {name}")
            return {key: part for key, part in value.items() if key != name}
        if how < 0.12:
            tricks.append(f"{name} twice")
            return {**value, f"{name}": _mark(raws, b'"a",%s:%s' % (json.dumps(name).encode(), _hostile(draw)))}
        if how < 0.17:
            tricks.append("more names")
            return {
                **value,
                draw.choice(("__class__", "a" * 300, "\0", "", "$ref", "x-y")): _mark(raws, _hostile(draw)),
            }
        return {**value, name: _changed(value[name], draw, raws, tricks)}
    if isinstance(value, list) and value and draw.random() < 0.7:
        at = draw.randrange(len(value))
        if draw.random() < 0.1:
            tricks.append("long list")
            return value * draw.choice((65, 300, 2000))
        return [*value[:at], _changed(value[at], draw, raws, tricks), *value[at + 1 :]]
    raw = _hostile(draw)
    tricks.append(f"value {raw[:40]!r}")
    return _mark(raws, raw)


def _mark(raws: list[bytes], raw: bytes) -> str:
    raws.append(raw)
    return _MARK % (len(raws) - 1)


def _hostile(draw: random.Random) -> bytes:
    kind = draw.random()
    if kind < 0.3:
        return draw.choice(NUMBERS)
    if kind < 0.55:
        return draw.choice(OTHER_TYPES)
    if kind < 0.75:
        return draw.choice(TEXTS)
    if kind < 0.85:
        unit = draw.choice((b"a", b"a ", b"9", rb"\u0001", "\N{GRINNING FACE}".encode(), b"[", b"<tool_call>"))
        return b'"' + unit * draw.choice(LENGTHS) + b'"'
    depth = draw.choice(DEPTHS)
    if kind < 0.9:
        opening, closing = draw.choice(((b"[", b"]"), (b'{"a":', b"}"), (b'{"items":', b"}"), (b'{"anyOf":[', b"]}")))
        return opening * depth + b"1" + closing * depth
    many = draw.choice((100, 1500, 20_000, 90_000))
    return draw.choice(
        (
            b"[" + b",".join([draw.choice((b"0", b"-1", b"1e308", b'"a"', b"[]", b"{}", b"null"))] * many) + b"]",
            b"{" + b",".join(b'"k%d":%d' % (number, number) for number in range(many // 2)) + b"}",
        )
    )


def _value(schema: Json, draw: random.Random, depth: int, name: str = "") -> Json:
    """A value that the schema allows, more or less."""
    if name in HINTS and draw.random() < 0.85:
        return draw.choice(HINTS[name])
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return draw.choice(schema["enum"])
    for union in ("anyOf", "oneOf"):
        if union in schema:
            return _value(draw.choice(schema[union]), draw, depth, name)
    match schema.get("type"):
        case "object":
            return _object(schema, draw, depth)
        case "array":
            fewest = schema.get("minItems", 0)
            count = fewest if depth > DEEPEST else fewest + draw.choice((0, 1, 1, 2))
            return [_value(schema.get("items", {}), draw, depth + 1, name.removesuffix("s")) for _ in range(count)]
        case "string":
            text = draw.choice(("a", "1+1?", "policy", "2", "openai/gsm8k", "calculator", "run-1"))
            return text.ljust(schema.get("minLength", 0), "a")
        case "integer":
            return schema.get("minimum", schema.get("exclusiveMinimum", 0)) + draw.randrange(4)
        case "number":
            least = schema.get("minimum", schema.get("exclusiveMinimum", 0))
            return least + draw.choice((0.25, 0.5, 1.0)) * (schema.get("maximum", least + 2) - least)
        case "boolean":
            return draw.random() < 0.5
        case "null":
            return None
        case _:
            return draw.choice(({}, {"a": 1}, "a", 1, [1], None, {"type": "object", "properties": {}}))


def _object(schema: Json, draw: random.Random, depth: int) -> Json:
    required = schema.get("required", ())
    share = 0.25 if depth < DEEPEST else 0.0
    fields = {
        name: _value(part, draw, depth + 1, name)
        for name, part in schema.get("properties", {}).items()
        if name in required or draw.random() < share
    }
    more = schema.get("additionalProperties")
    if isinstance(more, dict) and draw.random() < share:
        fields["a"] = _value(more, draw, depth + 1)
    return fields


def operations(document: Json, paths: Mapping[str, Json]) -> list[Operation]:
    """The routes of an OpenAPI document, and POST of further paths with bodies such as those given."""
    found: list[Operation] = []
    for path, methods in document["paths"].items():
        for method, route in methods.items():
            content = route.get("requestBody", {}).get("content", {})
            media, part = next(iter(content.items()), ("application/json", None))
            schema = None if part is None else _resolved(part["schema"], document, ())
            query = tuple(given["name"] for given in route.get("parameters", ()) if given["in"] == "query")
            weight = 4 if schema else 1
            found += [Operation(method.upper(), path, schema, query, media)] * weight
    return found + [Operation("POST", path, {"enum": bodies}) for path, bodies in paths.items()] * 4


def _resolved(schema: Json, document: Json, inside: tuple[str, ...]) -> Json:
    """The schema with its references in place; one that contains itself allows anything there."""
    if isinstance(schema, list):
        return [_resolved(part, document, inside) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if reference := schema.get("$ref"):
        if reference in inside:
            return {}
        target = document
        for part in reference.removeprefix("#/").split("/"):
            target = target[part]
        return _resolved(target, document, (*inside, reference))
    return {key: _resolved(part, document, inside) for key, part in schema.items()}
