"""The teachers of a run: which of them scores a row, and that each can be asked, before the first step."""

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from trackway.clients import AgentClient, CallPolicy, RolloutClient
from trackway.clients.weights import WeightStore
from trackway.learner.policy import model_folder
from trackway.learner.weight_proof import tensor_digests
from trackway.run_config.distillation import DistillationConfig
from trackway.trainer.service_urls import ServiceUrls
from trackway.wire.agent import Sample, Teacher
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.rollout import Architecture
from trackway.wire.weights import WeightProof, policy_url

_QUESTION = CallPolicy.question(30.0, attempts=3)
_PROBE = 'Natalia sold 48/2 = 24 clips; <tool_call>{"x": -1.5}</tool_call> größer, 数学 \n'
"""Text that tokenizers of different vocabularies encode differently."""


class Teaching:
    """Chooses the teacher of each row."""

    def __init__(self, config: DistillationConfig, models: Mapping[str, str]) -> None:
        """`models` are those that the agent service asks, by the teacher's name."""
        loss = config.distillation_loss
        self._field = config.teacher_key
        self._teachers = {
            teacher.key: Teacher(name=name, model=models[name], top_k=loss.topk if loss.uses_topk else 0)
            for name, teacher in config.teacher_models.given.items()
        }

    def of(self, sample: Sample) -> Teacher:
        """The teacher of a row. Raises TrackwayError(INVALID_REQUEST) for a row without one."""
        if len(self._teachers) == 1:
            return next(iter(self._teachers.values()))
        key = getattr(sample, self._field, None) or sample.extra_info.get(self._field)
        if str(key) not in self._teachers:
            keys = ", ".join(sorted(map(str, self._teachers)))
            message = (
                f"distillation.teacher_key: expected a {self._field} that a teacher has ({keys}), got {key!r} in row "
                f"{sample.index}; add a teacher with that key"
            )
            raise TrackwayError(ErrorCode.INVALID_REQUEST, message)
        return self._teachers[str(key)]


async def open_teaching(
    config: DistillationConfig, student: str, services: ServiceUrls, rows: Sequence[Sample]
) -> Teaching | None:
    """The run's teachers, or None without distillation. `student` is its model's folder or Hugging Face id.

    A teacher that is given as a model is published as a policy of the rollout service. Raises TrackwayError for a
    teacher with another vocabulary, one that no service has, and a row without a teacher.
    """
    if not config.enabled:
        return None
    tokenizer = await asyncio.to_thread(AutoTokenizer.from_pretrained, student)
    served = (await AgentClient(services.agent_url, policy=_QUESTION).agents()).teachers
    models = {
        name: await _model(name, teacher.model_path or "", student, tokenizer, services, served)
        for name, teacher in config.teacher_models.given.items()
    }
    teaching = Teaching(config, models)
    for sample in rows:
        teaching.of(sample)
    return teaching


async def _model(
    name: str,
    given: str,
    student: str,
    tokenizer: PreTrainedTokenizerBase,
    services: ServiceUrls,
    served: Mapping[str, str],
) -> str:
    """The name by which the agent service asks for a teacher."""
    named = {url.rstrip("/"): name for name, url in served.items()}.get(given.rstrip("/"), given)
    if named in served:
        await _require_same_tokens(name, served[named], student, tokenizer)
        return named
    key = f"distillation.teacher_models.{name}.model_path"
    if given.startswith(("http://", "https://")):
        known = ", ".join(f"{name} ({url})" for name, url in served.items()) or "none"
        message = f"{key}: expected a URL of the agent service's teachers ({known}), got {given}; add it there"
        raise TrackwayError(ErrorCode.INVALID_REQUEST, message)
    if not Path(given).is_dir() and services.rollout_url is not None:
        policies = await RolloutClient(services.rollout_url, policy=_QUESTION).policies()
        if given in [policy.name for policy in policies.policies]:
            return given
    return await asyncio.to_thread(_published, key, given, student, tokenizer, services.weights_url)


def _published(key: str, given: str, student: str, tokenizer: PreTrainedTokenizerBase, weights_url: str) -> str:
    """Publish a model as a policy, once. Return the policy's name."""
    try:
        folder = model_folder(given)
        theirs = AutoTokenizer.from_pretrained(folder)
        own, other = (
            Architecture.parsed((path / "config.json").read_text()) for path in (model_folder(student), folder)
        )
    except (OSError, ValueError) as error:
        message = f"{key}: expected a model, a policy or a URL, got {given!r}: {error}"
        raise TrackwayError(ErrorCode.INVALID_REQUEST, message) from error
    if theirs.get_vocab() != tokenizer.get_vocab():
        raise _other_vocabulary(key, given, student)
    if own and other and (different := own.different(other)):
        message = (
            f"{key}: expected the student's architecture, got {different} in {given}; serve it by a rollout service of "
            "its own, and name that in the agent service's teachers"
        )
        raise TrackwayError(ErrorCode.INVALID_REQUEST, message)
    digests = tensor_digests(folder)
    digest = hashlib.sha256("".join(f"{d.name} {next(iter(d.sha256.values()))}" for d in digests).encode()).hexdigest()
    name = f"teacher-{digest[:16]}"
    store = WeightStore(policy_url(weights_url, name))
    if store.latest() is None:
        store.publish(1, name, folder, WeightProof(digests=digests, dtype=digests[0].dtype))
    return name


async def _require_same_tokens(name: str, url: str, student: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise TrackwayError unless the service at the URL encodes a text as the student does."""
    key = f"distillation.teacher_models.{name}.model_path"
    body = {"prompt": _PROBE, "add_special_tokens": False, "max_tokens": 1, "return_token_ids": True}
    try:
        async with httpx.AsyncClient(base_url=f"{url.rstrip('/')}/v1", timeout=_QUESTION.total_s) as http:
            models = (await http.get("/models")).raise_for_status().json()["data"]
            reply = await http.post("/completions", json={"model": models[0]["id"], **body})
            theirs = reply.raise_for_status().json()["choices"][0]["prompt_token_ids"]
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        message = f"{key}: expected a rollout service at {url}, got {error!r}; start it, or correct its URL"
        raise TrackwayError(ErrorCode.UNAVAILABLE, message) from error
    if theirs != tokenizer(_PROBE, add_special_tokens=False)["input_ids"]:
        raise _other_vocabulary(key, url, student)


def _other_vocabulary(key: str, teacher: str, student: str) -> TrackwayError:
    message = (
        f"{key}: expected a teacher with the vocabulary of {student}, got {teacher} with another; a teacher scores the "
        "student's token ids, so take a model of one family"
    )
    return TrackwayError(ErrorCode.INVALID_REQUEST, message)
