"""The routes without the SDK: refusals, order, bounds, and what a restarted service still knows."""

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.services.trainer.calls.requests import request_of
from tests.services.trainer.tinker.conftest import Api, Spans
from tests.waiting import until
from tests.weight_proofs import ANY_PROOF
from trackway.clients.weights import WeightStore
from trackway.deploy.bundled import TINY_MODEL
from trackway.trainer.calls.log import RequestLog
from trackway.trainer.calls.protobuf import schema
from trackway.trainer.calls.results import weights_file
from trackway.trainer.tinker import routes, sampling, service, sessions
from trackway.trainer.tinker.service import BaseModelFacts
from trackway.wire.trainer import RunInfo, RunState
from trackway.wire.weights import policy_url

pytestmark = pytest.mark.slow

SESSION = {"tags": [], "user_metadata": {"who": "me"}, "sdk_version": "0.38.0"}
LORA = {"rank": 8, "train_unembed": True, "train_mlp": True, "train_attn": True}
PROMPT = {"chunks": [{"type": "encoded_text", "tokens": [1, 17, 9, 40, 5]}]}


class Caller:
    """Calls the routes of a URL."""

    def __init__(self, http: httpx.Client) -> None:
        self.http = http

    def post(self, path: str, body: object, status: int = 200) -> Any:
        answer = self.http.post(path, json=body)
        assert answer.status_code == status, answer.text
        return answer.json()

    def session(self) -> str:
        return self.post("create_session", SESSION)["session_id"]

    def model(self, session: str, number: int = 0) -> str:
        body = {"session_id": session, "model_seq_id": number, "base_model": "tiny", "lora_config": LORA}
        future = self.post("create_model", body)
        assert self.result(future["request_id"]) == {"type": "create_model", "model_id": future["model_id"]}
        return future["model_id"]

    def optim_step(self, model_id: str, seq_id: int, status: int = 200, **params: float) -> Any:
        return self.post("optim_step", {"model_id": model_id, "seq_id": seq_id, "adam_params": params}, status)

    def sampler(self, session: str, number: int = 0, base_model: str = "tiny") -> str:
        body = {"session_id": session, "sampling_session_seq_id": number, "base_model": base_model}
        return self.post("create_sampling_session", body)["sampling_session_id"]

    def asample(self, sampler: str, seq_id: int = 0, status: int = 200, **changes: Any) -> Any:
        params = {"max_tokens": 6, **changes.pop("sampling_params", {})}
        body = {"sampling_session_id": sampler, "seq_id": seq_id, "prompt": PROMPT, "sampling_params": params}
        return self.post("asample", {**body, **changes}, status)

    def result(self, request_id: str, status: int = 200) -> Any:
        return self.post("retrieve_future", {"request_id": request_id}, status)

    def drawn(self, request_id: str) -> Any:
        """The sample's protobuf."""
        answer = self.http.post("retrieve_future", json={"request_id": request_id})
        assert answer.headers["content-type"] == "application/x-protobuf", answer.text
        response = schema().SampleResponse()
        response.ParseFromString(answer.content)
        return response


@contextmanager
def calling(url: str, key: str = "tml-any") -> Iterator[Caller]:
    with httpx.Client(base_url=f"{url}/api/v1", headers={"x-api-key": key}, timeout=60) as http:
        yield Caller(http)


@pytest.fixture
def caller(url: str) -> Iterator[Caller]:
    with calling(url) as caller:
        yield caller


def tokens(response: Any) -> list[bytes]:
    return [bytes(sequence.tokens) for sequence in response.sequences]


def message(answer: Any) -> str:
    return answer["error"]["message"]


def test_an_unknown_base_model_is_refused_with_the_one_that_is_served(caller: Caller):
    body = {"session_id": caller.session(), "model_seq_id": 0, "base_model": "Qwen/Qwen3-8B", "lora_config": LORA}
    refused = message(caller.post("create_model", body, status=400))
    assert refused.startswith("base_model: expected ") and " or tiny, the model of the rollout service" in refused
    assert refused.endswith("got Qwen/Qwen3-8B; name that, or serve another (model_path)")


def test_samples_of_a_base_model_may_come_from_a_policy_of_the_rollout_service(
    caller: Caller, rollout_url: str, weights: Path
):
    WeightStore(policy_url(str(weights), "teacher")).publish(1, "teacher", TINY_MODEL, ANY_PROOF)
    sampler = caller.sampler(caller.session(), base_model="teacher")
    [sequence] = caller.drawn(caller.asample(sampler)["request_id"]).sequences
    assert len(sequence.tokens) > 0

    policies = httpx.get(f"{rollout_url}/policies").json()["policies"]
    assert [policy["loaded"] for policy in policies if policy["name"] == "teacher"] == [True]
    body = {"session_id": caller.session(), "sampling_session_seq_id": 0, "base_model": "elsewhere"}
    refused = message(caller.post("create_sampling_session", body, status=400))
    assert refused.endswith(f"got elsewhere; name that or a policy ({policies[0]['name']}, teacher)")


def test_a_path_that_ends_with_the_name_of_a_hub_is_that_model(caller: Caller):
    body = {"session_id": caller.session(), "model_seq_id": 0, "base_model": "bundled/tiny", "lora_config": LORA}
    model_id = caller.post("create_model", body)["model_id"]
    data = caller.post("get_info", {"model_id": model_id})["model_data"]
    assert (data["model_name"], data["tokenizer_id"]) == ("bundled/tiny", "bundled/tiny")


def test_a_field_of_no_request_is_a_400_with_its_name(caller: Caller):
    refused = caller.post("create_session", {**SESSION, "colour": 1}, status=400)
    assert (
        "colour: Extra inputs are not permitted" in message(refused) and refused["error"]["code"] == "invalid_request"
    )


def test_requests_are_executed_by_their_sequence_ids(caller: Caller, api: Api):
    model_id = caller.model(caller.session())
    later = [caller.optim_step(model_id, seq_id)["request_id"] for seq_id in (3, 2)]
    assert api.runs.executed == [f"{model_id}:0"]
    first = caller.optim_step(model_id, 1)["request_id"]
    assert [caller.result(id) for id in (*later, first)] == [{"metrics": {"grad_norm": 1.0}}] * 3
    assert api.runs.executed == [f"{model_id}:{seq}" for seq in range(4)]


def test_a_repeated_request_is_executed_once_and_another_under_its_id_refused(caller: Caller, api: Api):
    model_id = caller.model(caller.session())
    futures = [caller.optim_step(model_id, 1, learning_rate=1e-3) for _ in range(2)]
    refused = caller.optim_step(model_id, 1, status=400, learning_rate=1e-2)
    assert (
        futures[0] == futures[1] == {"request_id": f"{model_id}:1", "model_id": model_id, "sample_sequence_ids": None}
    )
    assert "expected a repeated request" in message(refused)
    until(lambda: api.runs.executed == [f"{model_id}:0", f"{model_id}:1"])


def test_requests_of_two_kinds_at_once_cannot_have_one_sequence_id(caller: Caller, api: Api):
    model_id = caller.model(caller.session())
    save = {"model_id": model_id, "seq_id": 1, "path": "ck1"}
    steps = {"model_id": model_id, "seq_id": 1, "adam_params": {}}
    with ThreadPoolExecutor(8) as pool:
        sent = [
            pool.submit(caller.http.post, path, json=body)
            for path, body in [("save_weights", save), ("optim_step", steps)] * 4
        ]
        statuses = sorted(future.result().status_code for future in sent)
    assert statuses == [200] * 4 + [400] * 4
    until(lambda: api.runs.executed == [f"{model_id}:0", f"{model_id}:1"])


def test_a_request_that_was_never_sent_has_no_result(caller: Caller):
    session = caller.session()
    model_id = caller.model(session)
    for id in (f"{model_id}:7", f"{session}:train:3:0", f"{session}:sample:0:0", "another:train:0:0"):
        assert caller.http.post("retrieve_future", json={"request_id": id}).status_code in (404, 410)


def test_a_result_that_takes_longer_is_asked_for_again(caller: Caller, api: Api, monkeypatch: pytest.MonkeyPatch):
    model_id = caller.model(caller.session())
    monkeypatch.setattr(service, "POLL_S", 0.05)
    monkeypatch.setattr(service.TinkerService.result, "__defaults__", (0.05,))
    api.runs.frozen = True
    id = caller.optim_step(model_id, 1)["request_id"]
    assert caller.result(id) == {"type": "try_again", "request_id": id, "queue_state": "active"}
    api.runs.told = RunInfo(run="run", state=RunState.RESTARTING)
    assert caller.result(id)["queue_state"] == "paused_capacity"


def test_a_run_that_failed_has_no_results_to_wait_for(caller: Caller, api: Api):
    model_id = caller.model(caller.session())
    api.runs.frozen = True
    id = caller.optim_step(model_id, 1)["request_id"]
    api.runs.told = RunInfo(run="run", state=RunState.FAILED, message="out of memory")
    assert "its run is failed: out of memory" in message(caller.result(id, status=410))


def test_the_size_of_a_large_result_is_sent_first_if_the_caller_allows_it(
    caller: Caller, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(routes, "MAX_INLINE_BYTES", 10)
    model_id = caller.model(caller.session())
    body = {"request_id": f"{model_id}:0", "allow_metadata_only": True}
    size = len(caller.http.post("retrieve_future", json={"request_id": f"{model_id}:0"}).content)
    assert caller.post("retrieve_future", body) == {"status": "complete_metadata", "response_payload_size": size}


def test_too_many_requests_of_a_model_wait_for_results(caller: Caller, api: Api, monkeypatch: pytest.MonkeyPatch):
    model_id = caller.model(caller.session())
    monkeypatch.setattr(sessions, "MAX_WAITING", 2)
    api.runs.frozen = True
    for seq_id in (3, 2):
        caller.optim_step(model_id, seq_id)
    full = caller.optim_step(model_id, 4, status=429)
    api.runs.frozen = False
    caller.optim_step(model_id, 1)  # the others wait for it
    until(lambda: len(api.runs.executed) == 4)
    caller.optim_step(model_id, 4)
    assert message(full).startswith("expected at most 2 requests") and full["error"]["detail"] == {"retry_after_s": 1}


def test_an_unloaded_model_takes_no_more_requests(caller: Caller):
    model_id = caller.model(caller.session())
    futures = [caller.post("unload_model", {"model_id": model_id}) for _ in range(2)]
    refused = caller.optim_step(model_id, 2, status=400)
    assert futures[0] == futures[1] and caller.result(futures[0]["request_id"])["model_id"] == model_id
    assert "which was unloaded" in message(refused)


def test_a_forward_backward_of_other_bytes_is_refused(caller: Caller):
    model_id = caller.model(caller.session())
    headers = {"content-type": "application/x-protobuf"}
    other = schema().ForwardBackwardRequest(model_id=model_id, seq_id=0, loss_fn="cross_entropy").SerializeToString()
    answers = [
        caller.http.post("forward_backward", content=body, headers=headers) for body in (b"\xff\xff", b"", other)
    ]
    assert [answer.status_code for answer in answers] == [400] * 3
    assert message(answers[0].json()).startswith("expected a ForwardBackwardRequest in protobuf")
    assert message(answers[2].json()) == "seq_id: expected 1 or more, got 0; count from 1"


def test_bytes_that_look_like_commas_are_no_json(caller: Caller):
    model_id = caller.model(caller.session())
    request = schema().ForwardBackwardRequest(model_id=model_id, seq_id=1, loss_fn="cross_entropy")
    request.data.add().model_input.add().encoded_text.tokens = b",,,,[{::" * 150_000
    headers = {"content-type": "application/x-protobuf"}
    answer = caller.http.post("forward_backward", content=request.SerializeToString(), headers=headers)
    assert answer.status_code != 413, answer.text


def test_the_same_seed_draws_the_same_sequences_and_samples_differ(caller: Caller):
    sampler = caller.sampler(caller.session())
    ids = [
        caller.asample(sampler, seq_id, num_samples=3, sampling_params={"seed": seed, "temperature": 3.0})["request_id"]
        for seq_id, seed in enumerate((7, 7, 8))
    ]
    first, again, other = [tokens(caller.drawn(id)) for id in ids]
    assert first == again != other and len(set(first)) > 1


def test_a_stop_text_ends_a_sequence_after_it_and_an_empty_list_lets_it_run(caller: Caller):
    sampler = caller.sampler(caller.session())
    params = {"temperature": 0.0, "max_tokens": 12}
    whole = caller.drawn(caller.asample(sampler, 0, sampling_params={**params, "stop": []})["request_id"]).sequences[0]
    ids = [*memoryview(whole.tokens).cast("i")]
    by_id = caller.drawn(caller.asample(sampler, 1, sampling_params={**params, "stop": [ids[3]]})["request_id"])
    [stopped] = by_id.sequences
    assert (whole.stop_reason, len(ids)) == (1, 12)
    end = ids.index(ids[3]) + 1
    assert ([*memoryview(stopped.tokens).cast("i")], stopped.stop_reason) == (ids[:end], 0)


def test_prompt_logprobs_and_the_most_likely_tokens(caller: Caller):
    sampler = caller.sampler(caller.session())
    future = caller.asample(sampler, prompt_logprobs=True, topk_prompt_logprobs=2, topk_sample_logprobs=3)
    response = caller.drawn(future["request_id"])
    last = caller.drawn(caller.asample(sampler, 1, prompt_logprobs=True, prompt_logprobs_last_n=2)["request_id"])
    scores, some = memoryview(response.prompt_logprobs).cast("f"), memoryview(last.prompt_logprobs).cast("f")
    top, sampled = response.topk_prompt_logprobs, response.sequences[0].topk_sampled_logprobs
    rows = memoryview(top.logprobs).cast("f")
    assert [score == score for score in scores] == [False, True, True, True, True]
    assert [score == score for score in some] == [False, False, False, True, True]
    assert [*some[3:]] == pytest.approx([*scores[3:]], abs=1e-5)
    assert (top.k, top.length, [*rows[:2]]) == (2, 5, [-99999.0] * 2) and all(score < 0 for score in rows[2:])
    assert (sampled.k, sampled.length) == (3, len(response.sequences[0].tokens) // 4)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"prompt": {"chunks": []}}, "prompt: expected at least one token"),
        ({"prompt_logprobs_last_n": 2}, "prompt_logprobs_last_n: expected 1 to 4 with prompt_logprobs"),
        ({"num_samples": 129}, "num_samples: Input should be less than or equal to 128"),
        ({"record_stability_info": True}, "record_stability_info"),
    ],
)
def test_samples_that_no_engine_can_draw_are_refused(caller: Caller, changes: dict[str, Any], problem: str):
    assert problem in message(caller.asample(caller.sampler(caller.session()), status=400, **changes))


def test_too_many_samples_are_refused_until_some_have_ended(caller: Caller, monkeypatch: pytest.MonkeyPatch):
    sampler = caller.sampler(caller.session())
    monkeypatch.setattr(sampling, "MAX_DRAWS", 0)
    assert message(caller.asample(sampler, status=429)).startswith("expected at most 0 samples in progress")


def test_a_sample_that_is_no_longer_in_memory_is_drawn_again(caller: Caller, monkeypatch: pytest.MonkeyPatch):
    sampler = caller.sampler(caller.session())
    monkeypatch.setattr(sampling, "MAX_KEPT", 1)
    hot = {"temperature": 3.0}
    ids = [caller.asample(sampler, seq_id, sampling_params=hot)["request_id"] for seq_id in range(2)]
    first, second = (tokens(caller.drawn(id)) for id in ids)
    assert [tokens(caller.drawn(id)) for id in ids] == [first, second] and first != second


def test_a_cancelled_sample_is_an_error(caller: Caller):
    sampler = caller.sampler(caller.session())
    id = caller.asample(sampler, sampling_params={"max_tokens": 900, "stop": []})["request_id"]
    caller.post("cancel_future", {"request_id": id})
    assert caller.result(id) == {"error": "the sample was cancelled", "category": "user"}


def test_a_restarted_service_knows_sessions_models_results_and_samples(api: Api):
    with api.served() as url, calling(url) as caller:
        session = caller.session()
        model_id, sampler = caller.model(session), caller.sampler(session)
        sampled = caller.asample(sampler, num_samples=2)
        before = caller.drawn(sampled["request_id"])
        caller.post("save_weights", {"model_id": model_id, "seq_id": 1, "path": "ck1"})
        saved = caller.post(
            "save_weights_for_sampler", {"model_id": model_id, "seq_id": 2, "sampling_session_seq_id": 7}
        )
        published = caller.result(saved["request_id"])
    with api.served() as url, calling(url) as caller:
        again = caller.asample(sampler, num_samples=2)
        after = caller.drawn(sampled["request_id"])
        newer = caller.drawn(caller.asample(published["sampling_session_id"], 3)["request_id"])
        listed = caller.http.get(f"training_runs/{model_id}/checkpoints").json()["checkpoints"]
        assert caller.result(f"{model_id}:0") == {"type": "create_model", "model_id": model_id}
        caller.post("session_heartbeat", {"session_id": session})
        assert caller.result(caller.optim_step(model_id, 3)["request_id"]) == {"metrics": {"grad_norm": 1.0}}
    assert published == {"type": "save_weights_for_sampler", "sampling_session_id": f"{session}:sample:7"}
    assert sampled == again and tokens(before) == tokens(after) and len(newer.sequences) == 1
    assert [checkpoint["tinker_path"] for checkpoint in listed] == [f"tinker://{model_id}/weights/ck1"]


def test_a_session_without_heartbeats_ends_with_its_run(api: Api):
    with api.served(tinker_idle_s=0.3) as url, calling(url) as caller:
        session = caller.session()
        model_id = caller.model(session)
        until(lambda: api.runs.ended == [session])
        gone = caller.post("session_heartbeat", {"session_id": session}, status=410)
        assert caller.result(f"{model_id}:0")["model_id"] == model_id
        assert message(caller.optim_step(model_id, 1, status=410)) == message(gone)
    assert "which has ended (no heartbeat for 0.3 s); create another" in message(gone)


def test_a_finished_session_takes_nothing_and_makes_room(api: Api):
    with api.served(tinker_max_sessions=1) as url, calling(url) as caller:
        session = caller.session()
        full = caller.post("create_session", SESSION, status=429)
        caller.post(f"sessions/{session}/finish", {"reason": {"type": "success"}})
        gone = caller.post("session_heartbeat", {"session_id": session}, status=410)
        assert caller.session() != session
    assert "(tinker_max_sessions)" in message(full) and "finished by its client: success" in message(gone)


def test_a_sample_joins_the_callers_trace_or_else_the_steps_and_data_link_to_it(caller: Caller, api: Api, spans: Spans):
    session = caller.session()
    model_id, sampler = caller.model(session), caller.sampler(session)
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    futures = []
    for seq_id, carried in enumerate(({"traceparent": f"00-{trace}-{parent}-01"}, {})):
        caller.http.headers.update(carried)
        seed = {"seed": 7_000_000 + seq_id}
        futures.append(caller.asample(sampler, seq_id, num_samples=2, sampling_params=seed))
        for name in carried:
            del caller.http.headers[name]
    for future in futures:
        caller.drawn(future["request_id"])
    named = [id for future in futures for id in future["sample_sequence_ids"]] + ["another:sample:0:0:0"]
    data = [([1, 2], {"target_tokens": [2, 3]})] * len(named)
    request = schema().ForwardBackwardRequest.FromString(request_of(data, "cross_entropy", samples=named))
    request.model_id = model_id
    headers = {"content-type": "application/x-protobuf"}
    caller.http.post("forward_backward", content=request.SerializeToString(), headers=headers).raise_for_status()
    record = json.loads((api.outputs / session / "calls" / "session.json").read_text())
    _, of_step, root, _ = record["step_traceparent"].split("-")
    chats = until(lambda: spans.chats() if "7000002" in spans.chats() else None)
    samples = [api.spans.samples()[future["request_id"]] for future in futures]
    [*_, (_, call, _)] = RequestLog(api.outputs / session / "calls").read()
    assert [sample[:2] for sample in samples] == [(trace, parent), (of_step, root)]
    assert [chats[seed] for seed in ("7000000", "7000002")] == [(sample[0], sample[2]) for sample in samples]
    assert {id: link.split("-")[1:3] for id, link in call.links.items()} == {
        id: [sample[0], sample[2]]
        for future, sample in zip(futures, samples, strict=True)
        for id in future["sample_sequence_ids"]
    }
    assert call.traceparent == record["step_traceparent"]


def test_a_step_has_a_trace_that_links_to_the_sessions_and_goes_on_after_a_restart(api: Api):
    with api.served() as url, calling(url) as caller:
        session = caller.session()
        model_id, sampler = caller.model(session), caller.sampler(session)
        caller.asample(sampler, 0)
        caller.asample(sampler, 1)
        caller.optim_step(model_id, 1)
        caller.asample(sampler, 2)
        roots = api.spans.named("step 1") + api.spans.named("step 2")
    with api.served() as url, calling(url) as caller:
        caller.asample(sampler, 3)
    folder = api.outputs / session / "calls"
    samples = [
        json.loads(line)["traceparent"].split("-")[1] for line in (folder / "samples.log").read_text().splitlines()
    ]
    of_session = json.loads((folder / "session.json").read_text())["traceparent"].split("-")[1]
    first, second = (format(root.context.trace_id, "032x") for root in roots)
    assert samples == [first, first, second, second] and of_session not in samples
    for step, root in enumerate(roots, 1):
        tags = {key: root.attributes[f"agentic.tag.{key}"] for key in ("train_step", "experiment_name")}
        assert tags == {"train_step": step, "experiment_name": session}
        assert [format(link.context.trace_id, "032x") for link in root.links] == [of_session]


TOKENS = {name: f"the-token-of-{name}-0123" for name in ("agent", "operator", "other")}
AUTH = {"tokens": {name: {"secret": TOKENS[name], "scopes": ["admin"]} for name in ("operator", "other")}}
AUTH["tokens"]["agent"] = {"secret": TOKENS["agent"]}


def test_only_an_operators_token_trains(api: Api):
    with (
        api.served(auth=AUTH) as url,
        calling(url, f"tml-{TOKENS['operator']}") as admin,
        calling(url, f"tml-{TOKENS['agent']}") as user,
        calling(url, "tml-another-token-0123") as stranger,
    ):
        session, users = admin.session(), user.session()
        model_id = admin.model(session)
        forbidden = user.optim_step(model_id, 1, status=403)
        drawn = user.drawn(user.asample(user.sampler(users))["request_id"])
        unknown = stranger.http.post("create_session", json=SESSION)
        owner = admin.http.get(f"training_runs/{model_id}").json()["model_owner"]
    assert "expected a token with the scope 'admin'" in message(forbidden) and len(drawn.sequences) == 1
    assert (unknown.status_code, owner) == (401, "operator")


def test_a_session_is_that_of_its_token(api: Api):
    with (
        api.served(auth=AUTH) as url,
        calling(url, f"tml-{TOKENS['operator']}") as owner,
        calling(url, f"tml-{TOKENS['other']}") as other,
    ):
        session = owner.session()
        model_id, sampler = owner.model(session), owner.sampler(session)
        sample = owner.asample(sampler)["request_id"]
        owner.drawn(sample)
        saved = owner.post("save_weights", {"model_id": model_id, "seq_id": 1, "path": "ck1"})["request_id"]
        path = owner.result(saved)["path"]
        theirs = other.session()
        new_model = {"session_id": theirs, "model_seq_id": 0, "path": path, "optimizer": False}
        answers = [
            other.asample(sampler, 1, status=404),
            other.optim_step(model_id, 2, status=404),
            other.result(sample, status=404),
            other.result(saved, status=404),
            other.post("cancel_future", {"request_id": sample}, status=404),
            other.post("session_heartbeat", {"session_id": session}, status=404),
            other.post(f"sessions/{session}/finish", {"reason": {"type": "success"}}, status=404),
            other.post("load_weights", new_model, status=404),
            other.post("weights_info", {"tinker_path": path}, status=404),
            other.http.get(f"training_runs/{model_id}/checkpoints").json(),
            other.http.delete(f"training_runs/{model_id}/checkpoints/weights/ck1").json(),
        ]
        lists = [caller.http.get("sessions").json()["sessions"] for caller in (owner, other)]
        runs = [caller.http.get("training_runs").json()["cursor"]["total_count"] for caller in (owner, other)]
        owner.drawn(sample)
    refusal = f"expected the id of a session of this token, got {session}; create one"
    assert [message(answer) for answer in answers] == [refusal] * len(answers)
    assert (lists, runs) == ([[session], [theirs]], [1, 0])


def weights_of(api: Api, store: Path, session: str) -> list[str]:
    """Save `kept` and `dropped`, as a run's process does. Returns their files and policies."""
    model_id, found = f"{session}:train:0", []
    for name in ("kept", "dropped"):
        file = weights_file(api.outputs, f"tinker://{model_id}/weights/{name}")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
        folder = store / "policies" / name
        folder.mkdir(parents=True)
        (folder / "latest.json").write_text("{}")
        found += [str(file), str(folder)]
    return found


def test_weights_are_deleted_by_their_owner_or_when_their_time_is_over(
    api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sessions, "CHECK_IDLE_S", 0.05)
    store, now = tmp_path / "weights", time.time()
    with api.served(weights_url=str(store)) as url, calling(url) as caller:
        session = caller.session()
        model_id = caller.model(session)
        files = weights_of(api, store, session)
        for seq_id, (op, name, ttl_s) in enumerate(
            (op, name, ttl_s)
            for op in ("save_weights", "save_weights_for_sampler")
            for name, ttl_s in (("kept", None), ("dropped", 3600))
        ):
            api.runs.policy = name
            body = {"model_id": model_id, "seq_id": seq_id + 1, "path": name, "ttl_seconds": ttl_s}
            caller.result(caller.post(op, body)["request_id"])
        listed = caller.http.get(f"training_runs/{model_id}/checkpoints").json()["checkpoints"]
        caller.post(f"sessions/{session}/finish", {"reason": {"type": "success"}})
    with api.served(weights_url=str(store)) as url, calling(url) as caller:
        checkpoints = f"training_runs/{model_id}/checkpoints"
        before = [Path(file).exists() for file in files]
        monkeypatch.setattr(time, "time", lambda: now + 3700)
        until(lambda: len(caller.http.get(checkpoints).json()["checkpoints"]) == 2)
        until(lambda: [Path(file).exists() for file in files] == [True, True, False, False])
        monkeypatch.undo()
        put = caller.http.put(f"{checkpoints}/weights/kept/ttl", json={"ttl_seconds": 60})
        due = caller.http.get(checkpoints).json()["checkpoints"][0]["expires_at"]
        caller.http.put(f"{checkpoints}/weights/kept/ttl", json={"ttl_seconds": None}).raise_for_status()
        deleted = [caller.http.delete(f"{checkpoints}/{kind}/kept") for kind in ("weights", "sampler_weights")]
        again = caller.http.delete(f"{checkpoints}/weights/kept")
    with api.served(weights_url=str(store)) as url, calling(url) as caller:
        assert caller.http.get(checkpoints).json()["checkpoints"] == []
    assert [datetime.fromisoformat(ck["expires_at"]).timestamp() if ck["expires_at"] else 0 for ck in listed] == [
        pytest.approx(time, abs=60) for time in (0, now + 3600, 0, now + 3600)
    ]
    assert before == [True] * 4 and not any(Path(file).exists() for file in files)
    assert [answer.status_code for answer in (put, *deleted, again)] == [204, 204, 204, 404]
    assert datetime.fromisoformat(due).timestamp() == pytest.approx(now + 60, abs=30)
    assert "expected saved weights of" in message(again.json())


def test_weights_that_are_saved_after_their_time_is_over_are_deleted_then(api: Api, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sessions, "CHECK_IDLE_S", 0.05)
    with api.served() as url, calling(url) as caller:
        models = [caller.model(session) for session in (caller.session(), caller.session())]

        def save(model_id: str) -> str:
            body = {"model_id": model_id, "seq_id": 1, "path": "short", "ttl_seconds": 1}
            return caller.post("save_weights", body)["request_id"]

        def checkpoints(model_id: str) -> list[dict[str, Any]]:
            return caller.http.get(f"training_runs/{model_id}/checkpoints").json()["checkpoints"]

        api.runs.frozen = True
        late = save(models[0])
        api.runs.frozen = False
        caller.result(save(models[1]))
        until(lambda: checkpoints(models[1]) == [])
        assert late not in api.runs.executed
        api.runs.wake(late.partition(":")[0])
        until(lambda: late in api.runs.executed and checkpoints(models[0]) == [])


def test_the_name_of_the_default_policy_stands_for_its_weights_and_the_models_for_untrained_ones():
    facts = BaseModelFacts("/models/Qwen/Qwen3-8B", "demo", 100)
    names = ["/models/Qwen/Qwen3-8B", "Qwen/Qwen3-8B", "Qwen3-8B", "demo", "teacher"]
    assert [facts.policy_of(name) for name in names] == ["base", "base", "base", "demo", "teacher"]


def test_a_deployment_without_the_schema_says_what_to_install(caller: Caller, monkeypatch: pytest.MonkeyPatch):
    schema.cache_clear()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    try:
        assert message(caller.post("create_session", SESSION, status=400)).endswith("pip install 'trackway[tinker]'")
    finally:
        schema.cache_clear()
