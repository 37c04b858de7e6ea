"""The unmodified SDK against the routes: a real rollout service, and runs that answer at once."""

from typing import Any

import httpx
import pytest
import tinker
from tinker import types

from tests.services.trainer.tinker.conftest import Api
from trackway.deploy.bundled import TINY_MODEL

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")]

PROMPT = types.ModelInput.from_ints([1, 17, 9, 40, 5])
INPUTS: Any = {"target_tokens": [2, 3, 4], "logprobs": [0.0, -0.1, -0.2], "advantages": [0.0, 1.0, 1.0]}
DATUM = types.Datum(
    model_input=types.ModelInput.from_ints([1, 2, 3]),
    loss_fn_inputs=INPUTS,
)


@pytest.fixture
def trainer(client: tinker.ServiceClient) -> tinker.TrainingClient:
    return client.create_lora_training_client(base_model="tiny", rank=8).result()


def sample(client: tinker.SamplingClient, prompt: types.ModelInput = PROMPT, n: int = 1, **params: object):
    return client.sample(prompt, n, types.SamplingParams(**{"max_tokens": 6, **params})).result()


def test_the_sdk_drives_every_route_that_it_needs(
    trainer: tinker.TrainingClient, client: tinker.ServiceClient, api: Api
):
    backward = trainer.forward_backward([DATUM, DATUM], "importance_sampling")
    step = trainer.optim_step(types.AdamParams(learning_rate=1e-4))
    output = backward.result()
    sampler = trainer.save_weights_and_get_sampling_client().result()
    drawn = sample(sampler, n=2, stop=["\n"])
    scores = sampler.compute_logprobs(PROMPT).result()
    state, published = trainer.save_state("ck1").result(), trainer.save_weights_for_sampler("p").result()
    session = client.holder.get_session_id()
    assert output.metrics == {"loss:sum": 1.5}
    assert [out["logprobs"].data for out in output.loss_fn_outputs] == [[-0.5] * 3] * 2
    assert step.result().metrics == {"grad_norm": 1.0}
    assert [sequence.sequence_id for sequence in drawn.sequences] == [f"{session}:sample:0:0:{i}" for i in range(2)]
    assert all(1 <= len(sequence.tokens) <= 6 for sequence in drawn.sequences)
    assert [len(sequence.logprobs or []) for sequence in drawn.sequences] == [len(s.tokens) for s in drawn.sequences]
    assert (
        scores[0] is None
        and len(scores) == PROMPT.length
        and all(score is not None and score < 0 for score in scores[1:])
    )
    assert state.path == f"tinker://{session}:train:0/weights/ck1"
    assert published.path == f"tinker://{session}:train:0/sampler_weights/p"
    assert api.runs.started == {session: {"actor_rollout_ref.model.path": str(TINY_MODEL)}}
    assert api.runs.executed == [f"{session}:train:0:{seq}" for seq in range(6)]


def test_facts_of_models_checkpoints_and_sessions(
    trainer: tinker.TrainingClient, client: tinker.ServiceClient, url: str
):
    trainer.save_state("ck1", user_metadata={"step": "1"}).result()
    trainer.save_weights_for_sampler("p").result()
    rest = tinker.RestClient(base_url=url, api_key="tml-any")
    model_id, session = trainer.model_id, client.holder.get_session_id()
    run = rest.get_training_run(model_id).result()
    listed = rest.list_checkpoints(model_id).result().checkpoints
    weights = rest.get_weights_info_by_tinker_path(f"tinker://{model_id}/weights/ck1").result()
    facts = rest.get_session(session).result()
    models = rest.get_server_capabilities().result().supported_models
    assert (run.training_run_id, run.base_model, run.lora_rank) == (model_id, "tiny", 8)
    assert run.last_checkpoint is not None and run.last_checkpoint.user_metadata == {"step": "1"}
    assert {(checkpoint.checkpoint_id, checkpoint.checkpoint_type) for checkpoint in listed} == {
        ("weights/ck1", "training"),
        ("sampler_weights/p", "sampler"),
    }
    assert (weights.base_model, weights.lora_rank, weights.train_unembed) == ("tiny", 8, True)
    assert (facts.training_run_ids, rest.list_sessions().result().sessions) == ([model_id], [session])
    assert [(model.model_name, model.max_context_length) for model in models] == [
        (str(TINY_MODEL), 1024),
        ("tiny", 1024),
    ]
    assert rest.list_training_runs().result().training_runs == [run]
    assert trainer.get_info().model_data.tokenizer_id == str(TINY_MODEL)


def test_a_checkpoint_expires_or_is_deleted(trainer: tinker.TrainingClient, url: str):
    path = trainer.save_state("ck1", ttl_seconds=7200).result().path
    rest = tinker.RestClient(base_url=url, api_key="tml-any")
    [expiring] = rest.list_checkpoints(trainer.model_id).result().checkpoints
    rest.set_checkpoint_ttl_from_tinker_path(path, None).result()
    [kept] = rest.list_checkpoints(trainer.model_id).result().checkpoints
    rest.delete_checkpoint_from_tinker_path(path).result()
    assert expiring.expires_at is not None and (expiring.expires_at - expiring.time).total_seconds() > 7000
    assert kept.expires_at is None and rest.list_checkpoints(trainer.model_id).result().checkpoints == []


def test_a_checkpoint_is_deleted_by_its_kind_and_name_alone(trainer: tinker.TrainingClient, url: str):
    trainer.save_state("0000").result()
    trainer.save_weights_for_sampler("0000").result()
    rest = tinker.RestClient(base_url=url, api_key="tml-any")
    with pytest.raises(tinker.NotFoundError):
        rest.delete_checkpoint(trainer.model_id, "0000").result()
    rest.delete_checkpoint(trainer.model_id, "sampler_weights/0000").result()
    [left] = rest.list_checkpoints(trainer.model_id).result().checkpoints
    assert left.checkpoint_id == "weights/0000"


def test_the_most_likely_token_is_the_same_for_every_seed(client: tinker.ServiceClient):
    sampler = client.create_sampling_client(base_model="tiny").result()
    drawn = {
        top_k: {
            tuple(sample(sampler, seed=seed, top_k=top_k, temperature=2.0).sequences[0].tokens) for seed in range(3)
        }
        for top_k in (1, -1)
    }
    assert (len(drawn[1]), len(drawn[-1])) == (1, 3)


def test_a_sampler_has_its_tokenizer_and_scores_a_prompt_when_it_is_asked_to(client: tinker.ServiceClient):
    sampler = client.create_sampling_client(base_model=str(TINY_MODEL)).result()
    plain = sample(sampler)
    scored = sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=1), include_prompt_logprobs=True).result()
    assert sampler.get_tokenizer().decode(PROMPT.to_ints()) and plain.prompt_logprobs is None
    assert scored.prompt_logprobs is not None and len(scored.prompt_logprobs) == PROMPT.length
    assert scored.topk_prompt_logprobs is None


def test_a_model_that_was_unloaded_computes_nothing(trainer: tinker.TrainingClient, url: str):
    trainer.forward([DATUM], "importance_sampling").result()
    answer = httpx.post(f"{url}/api/v1/unload_model", json={"model_id": trainer.model_id}, timeout=60)
    assert answer.json()["request_id"] == f"{trainer.model_id}:2"
    with pytest.raises(tinker.BadRequestError, match="which was unloaded"):
        trainer.forward([DATUM], "importance_sampling").result()


def test_a_model_is_created_from_a_checkpoint(trainer: tinker.TrainingClient, client: tinker.ServiceClient):
    path = trainer.save_state("ck1").result().path
    other = client.create_training_client_from_state_with_optimizer(path).result()
    assert other.get_info().lora_rank == 8 and other.model_id == trainer.model_id[:-1] + "1"
