"""The fake of SGLang answers as a real SGLang does: the same requests to both, and the shapes of what comes back."""

import asyncio
import contextlib
import json
import re
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import torch
from safetensors.torch import save_file

from tests.services.rollout.engines.remote.sglang import sglang_fake
from tests.sglang.sglang_runs import MARKS
from tests.vllm.vllm_runs import DEADLINE_S, MAX_LEN, PROMPT, VOCAB, Weights
from trackway.rollout.engines.remote.sglang import SglangEngine, _Finish, _Meta
from trackway.system import free_port

pytestmark = MARKS

Json = dict[str, Any]
EXACT = {"completion_tokens", "cached_tokens", "start", "end", "length", "status", "status_code"}
"""Numbers that are compared; of others, their types are."""
READ = {"meta_info": {*_Meta.model_fields}, "finish_reason": {*_Finish.model_fields}, "data": {"id"}}
"""The fields that the client reads; in these parts of an answer only they are compared."""
OF_TOKENS = ("output_token_logprobs", "output_token_sampling_mask")
"""Fields with an item for each token of a stream's piece."""
WITHOUT_TOKENIZER = {"text"}
"""Fields of a server with a tokenizer, which the fake is not."""
GREEDY = {"temperature": 0.0, "ignore_eos": True}


class Target(NamedTuple):
    """A server, real or fake, and folders that it can load."""

    http: httpx.AsyncClient
    whole: Path
    adapter: Path
    context: int
    vocab: int
    long_tokens: int

    async def ask(self, path: str, body: Json | None = None) -> Json:
        """The status and the answer."""
        reply = await self.http.post(path, json=body) if body is not None else await self.http.get(path)
        return answered(reply)

    async def generate(self, **more: Any) -> Json:
        """The answer to a short request."""
        return await self.ask("/generate", request(**more))

    async def stream(self, **more: Any) -> list[Any]:
        """The status of a streamed request, its pieces as one event, and what follows them."""
        return joined([event async for event in self.events(**more)])

    async def events(self, **more: Any) -> AsyncIterator[Any]:
        """The status, and the events as they come."""
        async with self.http.stream("POST", "/generate", json=request(stream=True, **more)) as reply:
            yield reply.status_code
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    yield json.loads(line.removeprefix("data: "))
                elif line:
                    yield line

    async def long(self, rid: str, **more: Any) -> "tuple[asyncio.Task[list[Any]], asyncio.Event]":
        """A request that runs for a second, and whether some of its tokens are here."""
        begun = asyncio.Event()

        async def read() -> list[Any]:
            found: list[Any] = []
            async for event in self.events(
                rid=rid, sampling_params={**GREEDY, "max_new_tokens": self.long_tokens}, **more
            ):
                found.append(event)
                if isinstance(event, dict) and event["meta_info"]["completion_tokens"] > 1:
                    begun.set()
            return found

        return asyncio.create_task(read()), begun


def joined(events: list[Any]) -> list[Any]:
    """The events with all pieces in one: a busy SGLang sends several at a time."""
    pieces = [event for event in events if isinstance(event, dict) and "output_ids" in event]
    if not pieces:
        return events
    whole = {"output_ids": [token for piece in pieces for token in piece["output_ids"]]}
    metas = [piece["meta_info"] for piece in pieces]
    lists = {
        name: [item for meta in metas for item in meta.get(name) or []] for name in OF_TOKENS if metas[-1].get(name)
    }
    first = events.index(pieces[0])
    return [
        *events[:first],
        {**pieces[-1], **whole, "meta_info": {**metas[-1], **lists}},
        *events[first + len(pieces) :],
    ]


def request(**more: Any) -> Json:
    """The client's request, of three tokens."""
    return {
        "input_ids": PROMPT,
        "sampling_params": {**GREEDY, "max_new_tokens": 3},
        "return_logprob": True,
        "logprob_start_len": -1,
        "extra_key": uuid.uuid4().hex,
        **more,
    }


def answered(reply: httpx.Response) -> Json:
    """An answer as data."""
    try:
        body = reply.json()
    except ValueError:
        body = reply.text
    return {"status": reply.status_code, "body": body}


def shape(value: Any, key: str = "") -> Any:
    """A value without what differs from run to run: paths, numbers in messages, logprobs, sampled tokens."""
    if isinstance(value, dict):
        read = READ.get(key, set(value)) - WITHOUT_TOKENIZER
        return {name: shape(item, name) for name, item in value.items() if name in read}
    if key == "output_token_sampling_mask":
        return [len(value), {type(token) for tokens in value for token in tokens}]
    if isinstance(value, list):
        return [shape(item, key) for item in value]
    if isinstance(value, str):
        return re.sub(
            r"(?<=expected one of ).*|(?<=dict_keys).*", "", re.sub(r"(?<= |\()\d+|/\S+|\[[\d:]+\]", "...", value)
        )
    if isinstance(value, bool) or value is None:
        return value
    return value if key in EXACT else type(value).__name__


def last(events: list[Any]) -> Json:
    """The last event's facts about its request."""
    return [event for event in events if isinstance(event, dict)][-1]["meta_info"]


def aborted(events: list[Any]) -> Json:
    """How a long request ended, which was to run until it was aborted."""
    reason = last(events)["finish_reason"]
    if reason["type"] == "length":
        raise TooLate
    return reason


class TooLate(Exception):
    """The long request of a case ended before the case asked: a busy machine. The case is asked again."""


def unworded(answer: Json) -> Json:
    """An answer whose message comes from a library."""
    hidden = {"message", "error_message"} & set(answer["body"])
    return {**answer, "body": {**answer["body"], **dict.fromkeys(hidden, "a message")}}


CASES: "dict[str, Callable[[Target], Awaitable[Any]]]" = {}


def case(ask: Callable[[Target], Awaitable[Any]]) -> Callable[[Target], Awaitable[Any]]:
    """A case of the contract, by its name."""
    CASES[ask.__name__] = ask
    return ask


@case
async def health(target: Target) -> Any:
    return await target.ask("/health")


@case
async def model_info(target: Target) -> Any:
    return (await target.ask("/model_info"))["body"]["weight_version"]


@case
async def server_info(target: Target) -> Any:
    body = (await target.ask("/server_info"))["body"]
    return {name: body[name] for name in ("disable_overlap_schedule", "quantization", "dtype")}


@case
async def models(target: Target) -> Any:
    return await target.ask("/v1/models")


ASKED: dict[str, Json] = {
    "plain": {},
    "scored": {"logprob_start_len": 0, "sampling_params": {"max_new_tokens": 1}},
    "sampling_mask": {"return_sampling_mask": True, "sampling_params": {"top_k": 2, "top_p": 0.9, "max_new_tokens": 3}},
    "unknown_field": {"no_such_field": 1},
    "with_key_and_id": {"extra_key": "7", "rid": "mine"},
    "stop_token": {"sampling_params": {"temperature": 0.0, "max_new_tokens": 100, "stop_token_ids": [*range(VOCAB)]}},
}
for _name, _more in ASKED.items():
    CASES[_name] = lambda target, more=_more: target.generate(**more)
    CASES[f"{_name}_streamed"] = lambda target, more=_more: target.stream(**more)


@case
async def long_stream(target: Target) -> Any:
    return await target.stream(sampling_params={**GREEDY, "max_new_tokens": 40})


@case
async def aborted_while_running(target: Target) -> Any:
    task, begun = await target.long("mine")
    await begun.wait()
    answers = [await target.ask("/abort_request", {"rid": rid}) for rid in ("another", "mine")]
    return [answers, aborted(await task)]


@case
async def prompts_without_room(target: Target) -> Any:
    return [await target.generate(input_ids=[5] * (target.context - free)) for free in (7, 6)]


@case
async def unknown_adapter(target: Target) -> Any:
    return await target.generate(lora_path="nowhere")


@case
async def aborted_with_one_whose_id_begins_its_own(target: Target) -> Any:
    tasks = [await target.long(rid) for rid in ("mine", "mine-too")]
    for _, begun in tasks:
        await begun.wait()
    await target.ask("/abort_request", {"rid": "mine"})
    (mine, _), (longer, _) = tasks
    return [aborted(await mine), last(await longer)["finish_reason"]]


@case
async def all_aborted(target: Target) -> Any:
    tasks = [await target.long(f"mine-{n}") for n in range(2)]
    for _, begun in tasks:
        await begun.wait()
    answer = await target.ask("/abort_request", {"rid": "", "abort_all": True})
    return [answer, [aborted(await task) for task, _ in tasks]]


@case
async def flushed_idle_and_busy(target: Target) -> Any:
    idle = await target.ask("/flush_cache", {})
    task, begun = await target.long("mine")
    await begun.wait()
    busy = await target.ask("/flush_cache", {})
    await target.ask("/abort_request", {"rid": "mine"})
    aborted(await task)
    return [idle, busy]


@case
async def paused_and_updated_in_flight(target: Target) -> Any:
    await target.ask("/update_weight_version", {"new_version": "default", "abort_all_requests": False})
    task, begun = await target.long("mine")
    await begun.wait()
    paused = await target.ask("/pause_generation", {"mode": "in_place"})
    update = {"model_path": str(target.whole), "weight_version": "new", "abort_all_requests": False}
    updated = await target.ask("/update_weights_from_disk", {**update, "keep_pause": True, "flush_cache": False})
    info = await model_info(target)
    continued = await target.ask("/continue_generation", {})
    spans = [span["version"] for span in last(await task)["weight_versions"]]
    if len(spans) == 1:
        raise TooLate
    return [paused, updated, info, continued, spans]


@case
async def version_named(target: Target) -> Any:
    body = {"new_version": "7", "abort_all_requests": False}
    return [await target.ask("/update_weight_version", body), await model_info(target)]


@case
async def missing_folder(target: Target) -> Any:
    body = {"model_path": "/nowhere/at/all", "weight_version": "8", "abort_all_requests": False, "flush_cache": False}
    await target.ask("/pause_generation", {"mode": "in_place"})
    answer = await target.ask("/update_weights_from_disk", {**body, "keep_pause": True})
    await target.ask("/continue_generation", {})
    return unworded(answer)


@case
async def adapters(target: Target) -> Any:
    body = {"lora_name": "mine", "lora_path": str(target.adapter)}
    loaded = await target.ask("/load_lora_adapter", body)
    nowhere = {"lora_name": "other", "lora_path": "/nowhere/at/all"}
    missing = unworded(await target.ask("/load_lora_adapter", nowhere))
    models = await target.ask("/v1/models")
    made = await target.generate(lora_path="mine")
    unloaded = [await target.ask("/unload_lora_adapter", {"lora_name": "mine"}) for _ in range(2)]
    return [loaded, missing, models, made, unloaded]


@case
async def memory(target: Target) -> Any:
    return [await target.ask(f"/{verb}_memory_occupation", {"tags": ["kv_cache"]}) for verb in ("release", "resume")]


@pytest.fixture
async def real(engine: SglangEngine, second: Weights, tmp_path: Path) -> AsyncIterator[Target]:
    """The session's server."""
    async with httpx.AsyncClient(base_url=engine.http.base_url, timeout=DEADLINE_S) as http:
        await engine._call_weights("default")
        yield Target(http, second.folder, write_adapter(tmp_path / "adapter"), MAX_LEN, VOCAB, long_tokens=900)
    await engine._call_weights(engine.control.held)


def write_adapter(folder: Path) -> Path:
    """An adapter of the models of `tests/vllm` that changes nothing."""
    folder.mkdir()
    outputs = {"q_proj": 64, "k_proj": 32, "v_proj": 32}
    matrices = {}
    for layer, size in outputs.items():
        name = f"base_model.model.model.layers.0.self_attn.{layer}"
        matrices |= {f"{name}.lora_A.weight": torch.zeros(2, 64), f"{name}.lora_B.weight": torch.zeros(size, 2)}
    save_file(matrices, folder / "adapter_model.safetensors")
    config = {"r": 2, "lora_alpha": 2, "target_modules": [*outputs], "peft_type": "LORA", "task_type": "CAUSAL_LM"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
async def fake(tmp_path: Path) -> AsyncIterator[Target]:
    """A fake of its own."""
    server = sglang_fake.Fake(sglang_fake.write_base(tmp_path / "fake-base", 0))
    server.stream_interval, server.step_s = 16, 0.01
    whole, adapter = sglang_fake.write_weights(tmp_path / "fake", 1), tmp_path / "fake-adapter"
    sglang_fake.write_adapter(adapter, 2)
    async with (
        sglang_fake.serving(server, free_port()) as url,
        httpx.AsyncClient(base_url=url, timeout=DEADLINE_S) as http,
    ):
        target = Target(http, whole, adapter, sglang_fake.CONTEXT, sglang_fake.VOCAB, long_tokens=200)
        update = {"model_path": str(whole), "weight_version": "default", "abort_all_requests": False}
        await target.ask("/update_weights_from_disk", {**update, "flush_cache": False})  # as the real one's engine
        yield target


async def answer(name: str, target: Target) -> Any:
    """A case's answer from a target."""
    while True:
        with contextlib.suppress(TooLate):
            return shape(await CASES[name](target))


@pytest.mark.parametrize("name", CASES)
async def test_the_fake_answers_as_sglang_does(name: str, real: Target, fake: Target) -> None:
    async with asyncio.timeout(DEADLINE_S):
        assert await answer(name, fake) == await answer(name, real)
