"""Teachers score the tokens that the student wrote, for on-policy distillation.

A teacher is a policy of the rollout service, or a rollout service of its own that the agent service's `teachers` name.
"""

import asyncio
from collections.abc import Sequence

import httpx
from pydantic import SecretStr

from trackway.agent.settings import AgentSettings
from trackway.clients import Deadline, RolloutClient
from trackway.tracing import extracted
from trackway.wire.agent import Teacher
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.rollout import GenerateRequest, PromptLogprobs, SamplingParams
from trackway.wire.trajectory import TeacherScores, Trajectory, require_trainable


class Teachers:
    """Asks teachers for the logprobs of trajectories."""

    def __init__(self, settings: AgentSettings, rollout: RolloutClient, http: httpx.AsyncClient | None = None) -> None:
        self._rollout = rollout
        no_token = SecretStr("")  # the deployment's own is for no other host
        self._own = {
            name: RolloutClient(url, http, settings.rollout_policy, no_token, batches=http is None)
            for name, url in settings.teachers.items()
        }

    async def scores(
        self, teacher: Teacher, rows: Sequence[Trajectory], group: str, deadline: Deadline
    ) -> list[TeacherScores]:
        """The scores of each row of a trajectory, from one pass of the teacher over it. Raises TrackwayError."""
        client, policy = self._own.get(teacher.model), None
        if client is None:
            client, policy = self._rollout, teacher.model
        params = SamplingParams(max_tokens=1, prompt_logprobs=teacher.top_k)
        requests = [
            GenerateRequest(
                request_id=f"{row.id}/teacher+{place}",
                model=policy,
                token_ids=row.prompt_ids + row.response_ids,
                sampling_params=params,
            )
            for place, row in enumerate(rows)
        ]
        earlier = deadline.earlier(client.policy.total_s)
        with extracted({}):  # a pass over the tokens is no generation of the trajectory, so it has no span of its own
            replies = await asyncio.gather(*(client.generate(request, group, earlier) for request in requests))
        return [_of_row(teacher, row, reply.prompt_logprobs) for row, reply in zip(rows, replies, strict=True)]


def mean_kl(rows: Sequence[Trajectory], scores: Sequence[TeacherScores]) -> float:
    """Mean of log p - log q of student p and teacher q over the student's tokens, the reverse KL's estimate k1."""
    written = [
        logprob
        for row in rows
        for logprob, is_own in zip(row.response_logprobs, row.response_mask, strict=True)
        if is_own
    ]
    taught = [logprob for score in scores for logprob in score.logprobs]
    return sum(ours - theirs for ours, theirs in zip(written, taught, strict=True)) / max(1, len(written))


def _of_row(teacher: Teacher, row: Trajectory, scored: PromptLogprobs | None) -> TeacherScores:
    expected = len(row.prompt_ids) + len(row.response_ids) - 1
    if scored is None or len(scored.logprobs) != expected:
        got = "none" if scored is None else str(len(scored.logprobs))
        message = f"expected {expected} logprobs of teacher {teacher.name!r}, got {got}; look at its service's log"
        raise TrackwayError(ErrorCode.UNAVAILABLE, message)
    first = len(row.prompt_ids) - 1
    places = [first + place for place, is_own in enumerate(row.response_mask) if is_own]
    require_trainable(f"the logprobs of teacher {teacher.name!r}", [scored.logprobs[place] for place in places])
    return TeacherScores(
        teacher=teacher.name,
        logprobs=[scored.logprobs[place] for place in places],
        top_ids=[scored.top_ids[place] for place in places] if teacher.top_k else [],
        top_logprobs=[scored.top_logprobs[place] for place in places] if teacher.top_k else [],
    )
