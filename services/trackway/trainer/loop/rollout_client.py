"""Collects groups of rollouts from the agent service.

Trajectory ids are deterministic, so after a broken stream the client requests exactly the rollouts that are missing.
Rollouts that are still missing when the retries are used up are recorded as failed. They never fail the batch.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pydantic import ValidationError

from trackway.clients import AgentClient, Deadline
from trackway.learner.filtering import REWARD_BASELINE, OverlongPenalty
from trackway.learner.measuring import ActiveTime
from trackway.system.waits import Backoff, Waiting, longest_chain, noted_in
from trackway.trainer.loop.group_source import GroupSource
from trackway.wire.agent import GroupRequest, Limits, Sample
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.rollout import SamplingParams
from trackway.wire.service import Wait
from trackway.wire.trajectory import StopReason, TraceTarget, Trajectory, require_placed, require_trainable

if TYPE_CHECKING:
    from trackway.trainer.loop.teaching import Teaching


def with_baseline(trajectories: Sequence[Trajectory], greedy: Trajectory) -> list[Trajectory]:
    """The group with the greedy rollout's score in each reward, and the greedy rollout itself, which is not trained.

    Without that score each trajectory fails with the greedy rollout's error: none is compared with a made-up baseline.
    """
    greedy = greedy.model_copy(update={"is_baseline": True})
    if greedy.error is None and greedy.reward is not None:
        return [*(_based(trajectory, greedy.reward.score) for trajectory in trajectories), greedy]
    lacking = TrackwayError(ErrorCode.INTERNAL, "expected a reward, got none").to_reply().error
    error = greedy.error or lacking
    error = error.model_copy(update={"message": f"the greedy rollout {greedy.id} of the group failed: {error.message}"})
    failed = {"stop_reason": StopReason.ERROR}
    return [
        *(trajectory.model_copy(update={**failed, "error": trajectory.error or error}) for trajectory in trajectories),
        greedy,
    ]


def sampled_of(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """Trajectories that are no greedy rollouts."""
    return [trajectory for trajectory in trajectories if not trajectory.is_baseline]


def _based(trajectory: Trajectory, baseline: float) -> Trajectory:
    if trajectory.reward is None:
        return trajectory
    components = {**trajectory.reward.components, REWARD_BASELINE: baseline}
    reward = trajectory.reward.model_copy(update={"components": components})
    return trajectory.model_copy(update={"reward": reward})


logger = logging.getLogger("trackway.trainer")


LONGEST_PAUSE_S = 15.0
REPORT_WAITS_S = 5.0
"""The agent service says what rollouts wait for when none of a group has ended for so long."""


@dataclass(frozen=True)
class GroupTemplate:
    """The part of a group request that is the same for every sample of a training or a validation batch."""

    run: str
    experiment_name: str
    n: int
    sampling_params: SamplingParams
    limits: Limits
    default_agent: str
    validation: bool = False
    tools: list[str] | None = None
    policy: str | None = None
    trace_target: TraceTarget = field(default_factory=TraceTarget)
    teachers: "Teaching | None" = None
    """None without distillation, and for validation."""

    def group(self, sample: Sample, step: int, min_weight_version: int, trace: bool) -> GroupRequest:
        """The request for all n rollouts of one sample."""
        return GroupRequest(
            run=self.run,
            experiment_name=self.experiment_name,
            step=step,
            validate=self.validation,
            sample=sample.model_copy(update={"agent_name": sample.agent_name or self.default_agent}),
            n=self.n,
            sampling_params=self.sampling_params,
            limits=self.limits,
            min_weight_version=min_weight_version,
            trace=trace,
            trace_target=self.trace_target,
            tools=self.tools,
            policy=self.policy,
            teacher=None if self.teachers is None else self.teachers.of(sample),
            report_waits_s=REPORT_WAITS_S,
        )

    def greedy(self, request: GroupRequest) -> GroupRequest:
        """The request for one greedy rollout more, whose number `rollout_n` is n."""
        params = request.sampling_params.model_copy(update={"temperature": 0.0, "top_p": 1.0, "top_k": -1})
        changes = {"n": self.n + 1, "rollouts": [self.n], "sampling_params": params, "is_baseline": True}
        changes["teacher"] = None
        return request.model_copy(update=changes)


@dataclass(frozen=True)
class RetryPolicy:
    """Limits on the requests for one group, and on groups in flight."""

    attempts: int = 12
    """Requests in a row that bring no further trajectory. Their pauses add up to 50 s to 105 s."""
    timeout_s: float = 1800.0
    max_inflight: int = 64
    backoff_s: float = 0.5
    """First pause before a retry; doubled each time, with jitter, up to `LONGEST_PAUSE_S`."""


class Rollouts(GroupSource):
    """Collects groups from the agent's streams."""

    def __init__(
        self,
        client: AgentClient,
        template: GroupTemplate,
        retry_policy: RetryPolicy,
        active: ActiveTime | None = None,
        overlong: OverlongPenalty | None = None,
        greedy_baseline: bool = False,
    ) -> None:
        super().__init__(active)
        self._client = client
        self._template = template
        self._retry_policy = retry_policy
        self._slots = asyncio.Semaphore(retry_policy.max_inflight)
        self._overlong = overlong
        self._greedy_baseline = greedy_baseline

    @property
    def n(self) -> int:
        """Rollouts of each sample, a greedy one included."""
        return self._template.n + self._greedy_baseline

    async def collect(
        self,
        batch: Sequence[Sample],
        step: int,
        min_weight_version: int,
        traced: frozenset[int] = frozenset(),
    ) -> list[Trajectory]:
        """All rollouts of every sample, in the batch's order. A failed rollout has its `error` set.

        `traced` are the positions in the batch whose rollouts are recorded.
        """
        async with asyncio.TaskGroup() as tasks:
            groups = [
                tasks.create_task(self.group(sample, step, min_weight_version, position in traced))
                for position, sample in enumerate(batch)
            ]
        return [trajectory for group in groups for trajectory in group.result()]

    async def group(self, sample: Sample, step: int, min_weight_version: int, trace: bool) -> list[Trajectory]:
        """All n rollouts of one sample, in order. A failed rollout has its `error` set.

        With a greedy baseline a greedy rollout is requested at the same time, the last one of the group. Its score
        becomes a component of theirs.
        """
        async with self._slots:
            request = self._template.group(sample, step, min_weight_version, trace)
            name = f"group {step}/{sample.index}"
            if not self._greedy_baseline:
                return await self._waited_for(request, name)
            async with asyncio.TaskGroup() as tasks:
                sampled = tasks.create_task(self._waited_for(request, name))
                greedy = tasks.create_task(self._waited_for(self._template.greedy(request), f"{name}, greedy"))
            return with_baseline(sampled.result(), greedy.result()[0])

    async def _waited_for(self, request: GroupRequest, name: str) -> list[Trajectory]:
        timeout_s = self._retry_policy.timeout_s
        with self.active(), self.waits(name, "the agent service", timeout_s) as waiting, noted_in([waiting]):
            return await self._group(request, waiting)

    async def _group(self, request: GroupRequest, waiting: Waiting) -> list[Trajectory]:
        deadline = Deadline.after(self._retry_policy.timeout_s)
        got: dict[int, Trajectory] = {}
        problem: TrackwayError | None = None
        wanted, fruitless = request.rollout_numbers(), 0

        def progress() -> str:
            asked_again = f"; asked again after: {problem}" if problem is not None else ""
            return f"{len(got)} of {len(wanted)} rollouts have ended{asked_again}"

        waiting.progress = progress
        backoff = Backoff(self._retry_policy.backoff_s, LONGEST_PAUSE_S, spread=(0.5, 1.0))
        while fruitless < self._retry_policy.attempts:
            if problem is not None:
                self.retries += len(wanted) - len(got)
                await asyncio.sleep(min(backoff.pause_s(max(1, fruitless)), deadline.remaining))
            had = len(got)
            problem = await self._receive(_for_missing(request, got), got, deadline, waiting)
            if problem is None or not problem.retryable:
                break
            fruitless = 0 if len(got) > had else fruitless + 1
            logger.warning("group %s: %s; asking again", request.sample.index, problem)
        error = problem or TrackwayError(ErrorCode.INTERNAL, "no rollout came and no error was given")
        return [got.get(n) or request.failed(n, error) for n in wanted]

    async def _receive(
        self, request: GroupRequest, got: dict[int, Trajectory], deadline: Deadline, waiting: Waiting
    ) -> TrackwayError | None:
        """Fills `got` from one stream. Returns the error. None when no rollout is missing.

        Meanwhile `waiting` has what the rollouts wait for.
        """
        wanted = set(request.rollout_numbers())

        def note(waits: list[Wait]) -> None:
            waiting.because = lambda: waits

        try:
            async for trajectory in self._client.group(request, deadline, note):
                note([])
                if trajectory.tags.rollout_n in wanted:
                    found = checked(trajectory)
                    got[trajectory.tags.rollout_n] = self._overlong.applied(found) if self._overlong else found
        except TrackwayError as error:
            problem = error
        except ValidationError as error:
            problem = TrackwayError(ErrorCode.UNAVAILABLE, f"the stream broke within a line: {error}")
        else:
            missing = sorted(wanted - got.keys())
            problem = TrackwayError(ErrorCode.UNAVAILABLE, f"the stream ended without rollouts {missing}")
        missed_by = longest_chain(waiting.because(), time.time())
        note([])
        if problem.code is ErrorCode.DEADLINE_EXCEEDED and missed_by:
            problem = TrackwayError(problem.code, f"{problem.message}; at the end {missed_by}", **problem.detail)
        return problem if wanted - got.keys() else None


def checked(trajectory: Trajectory) -> Trajectory:
    """The trajectory, with an error set when its numbers cannot be trained on: other agents may send any."""
    try:
        for row in trajectory.rows:
            require_trainable("response_logprobs", row.response_logprobs)
        reward = trajectory.reward
        scores = [] if reward is None else [reward.score, *reward.turn_scores, *reward.token_scores]
        require_trainable("the score", scores)
        require_placed(trajectory)
    except TrackwayError as error:
        failed = {"stop_reason": StopReason.ERROR, "error": trajectory.error or error.to_reply().error}
        return trajectory.model_copy(update=failed)
    return trajectory


def _for_missing(request: GroupRequest, got: dict[int, Trajectory]) -> GroupRequest:
    if not got:
        return request
    return request.model_copy(update={"rollouts": [n for n in request.rollout_numbers() if n not in got]})
