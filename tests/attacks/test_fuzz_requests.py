"""Random requests are a function of their seed, and most of them differ from a valid one."""

import random
from collections import Counter

from tests.attacks.fuzz_requests import FuzzRequest, Operation, operations, request

SCORE = {
    "type": "object",
    "required": ["data_source", "score"],
    "properties": {
        "data_source": {"type": "string"},
        "score": {"type": "number"},
        "parts": {"$ref": "#/schemas/parts"},
    },
}
DOCUMENT = {
    "paths": {
        "/score/{name}": {
            "post": {"requestBody": {"content": {"application/json": {"schema": {"$ref": "#/schemas/s"}}}}}
        },
        "/health": {"get": {"parameters": [{"in": "query", "name": "follow"}]}},
    },
    "schemas": {"s": SCORE, "parts": {"type": "array", "items": {"$ref": "#/schemas/parts"}}},
}
OPERATIONS = operations(DOCUMENT, {"/mcp": [{"id": 1}]})


def drawn(seed: int, cases: int = 400) -> list[FuzzRequest]:
    return [request(OPERATIONS, {"name": ["known"]}, random.Random(f"{seed} {number}")) for number in range(cases)]


def test_the_routes_are_those_of_the_document_and_those_given() -> None:
    parts = {"type": "array", "items": {}}  # a schema within itself
    score = {**SCORE, "properties": {**SCORE["properties"], "parts": parts}}

    assert list(dict.fromkeys(map(repr, OPERATIONS))) == [
        repr(Operation("POST", "/score/{name}", score)),
        repr(Operation("GET", "/health", None, ("follow",))),
        repr(Operation("POST", "/mcp", {"enum": [{"id": 1}]})),
    ]


def test_a_seed_gives_the_same_requests_each_time_and_another_seed_others() -> None:
    assert drawn(0, 50) == drawn(0, 50)
    assert drawn(0, 50) != drawn(1, 50)


def test_a_part_is_valid_and_the_others_have_each_kind_of_trick() -> None:
    requests = drawn(0)
    tricks = Counter(trick.partition(" ")[0] for case in requests for trick in case.tricks)

    assert 0.1 < sum(not case.tricks for case in requests) / len(requests) < 0.4
    assert {"headers", "path", "method", "value", "without", "chunked", "dripped", "short", "gzip", "both"} <= set(
        tricks
    )


def test_a_valid_request_names_known_ids_and_has_the_length_of_its_body() -> None:
    [first, *_] = (case for case in drawn(0) if not case.tricks and case.pieces[0].startswith(b"POST /score/known "))
    head, _, body = first.pieces[0].partition(b"\r\n\r\n")

    assert f"content-length: {len(body)}".encode() in head.splitlines()
    assert (first.whole, first.body_bytes) == (True, len(body))
