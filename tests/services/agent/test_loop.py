"""Loops of one's own, and what their defects do."""

import asyncio
import itertools
import logging
import sys
from contextlib import AbstractContextManager
from typing import ClassVar

import pytest

from tests.services.agent.agent_services import AgentServices, call, group
from tests.services.agent.replaceable import answers
from tests.services.agent.scripted_model import END, Words
from trackway.agent import AgentLoop, Episode, Toolbox, register
from trackway.agent.episode import waits_for
from trackway.agent.loop import agent_loop, agents, request_seed
from trackway.clients import Deadline
from trackway.rollout.engines.protocol import FinishReason
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.reward import ScoreRequest
from trackway.wire.rollout import (
    ChoiceLogprobs,
    GenerateChoice,
    GeneratePiece,
    GenerateReply,
    TokenLogprob,
    Usage,
)
from trackway.wire.trajectory import StopReason, Turn, WeightSpan


@register("defective_agent")
class DefectiveAgent(AgentLoop):
    """Raises what nobody foresaw.

    Only in tests.
    """

    async def converse(self, episode: Episode, toolbox: Toolbox) -> StopReason:
        raise KeyError("left out")


@pytest.mark.anyio
async def test_a_defect_ends_one_trajectory_and_is_logged_once(
    services: AgentServices, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        [trajectory] = await services.run(group(agent_name="defective_agent"))

    assert trajectory.error is not None
    assert trajectory.error.code is ErrorCode.INTERNAL
    assert "KeyError: 'left out'" in trajectory.error.message
    [record] = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert record.exc_info is not None


@register("exiting_agent")
class ExitingAgent(AgentLoop):
    """In rollout 1: leaves as its prompt says. Only in tests."""

    async def converse(self, episode: Episode, toolbox: Toolbox) -> StopReason:
        how = str(episode.sample.prompt[0].content)
        if episode.tags.rollout_n == 0:
            return StopReason.ANSWERED
        if how == "cancel":
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            await asyncio.sleep(5)
        if how == "gathered":
            await asyncio.gather(asyncio.sleep(5), self.leave())
        if how == "interrupt":
            raise KeyboardInterrupt
        return await self.leave()

    async def leave(self) -> StopReason:
        sys.exit("no more")


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("how", "what"),
    [
        ("exit", "it called sys.exit('no more')"),
        ("gathered", "it called sys.exit('no more')"),
        ("interrupt", "it raised KeyboardInterrupt, which is not an Exception"),
        ("cancel", "it cancelled itself"),
    ],
)
async def test_a_loop_that_exits_ends_its_own_trajectory_alone(services: AgentServices, how: str, what: str) -> None:
    prompt = [{"role": "user", "content": how}]

    fine, ended = await services.run(group(agent_name="exiting_agent", n=2, sample__prompt=prompt))

    assert (fine.error, fine.stop_reason) == (None, StopReason.ANSWERED)
    assert ended.error is not None
    assert (ended.error.code, ended.error.message) == (
        ErrorCode.INTERNAL,
        f"agent loop 'exiting_agent' failed: {what}; the agent service logged the traceback",
    )


@pytest.mark.anyio
async def test_a_seed_gives_each_rollout_its_own_whatever_the_run_is_called(services: AgentServices) -> None:
    services.model.scripts = {0: ["a" + END, "a" + END], 1: ["b" + END, "b" + END]}

    await services.run(group(n=2, sampling_params__seed=1, run="first"))
    await services.run(group(n=2, sampling_params__seed=1, run="second"))

    first, second = ([request.sampling_params.seed for request in services.model.seen(number)] for number in (0, 1))
    assert first[0] == first[1]
    assert second[0] == second[1]
    assert first[0] != second[0]


@pytest.mark.anyio
async def test_each_generation_is_sampled_as_the_group_asks_with_a_seed_of_its_own(services: AgentServices) -> None:
    asked = {"temperature": 0.7, "top_p": 0.8, "top_k": 11}
    cut = says(services, "####", "18" + END)

    sampling = {**asked, "max_tokens": 100, "seed": 5}
    tags = (await services.say(call("counter") + END, *cut, sampling_params=sampling)).tags

    seeds = [request_seed(5, tags, turn, part) for turn, part in ((0, 0), (1, 0), (1, 1))]  # the second turn was cut
    sampled = [request.sampling_params.model_dump(include={*asked, "seed"}) for request in services.model.seen()]
    assert sampled == [{**asked, "seed": seed} for seed in seeds]


def says(services: AgentServices, *parts: str) -> list[Words]:
    """One turn whose generation the engine cuts behind each part but the last."""

    def part(text: str, finish_reason: FinishReason | None) -> Words:
        async def word() -> str:
            services.model.finish_reason = finish_reason
            return text

        return word

    return [*(part(text, "abort") for text in parts[:-1]), part(parts[-1], None)]


@pytest.mark.anyio
async def test_a_turn_that_was_cut_goes_on_under_a_name_of_its_own_with_the_tokens_it_has_left(
    services: AgentServices,
) -> None:
    trajectory = await services.say(
        call("counter") + END, *says(services, "####", " ", "18" + END), sampling_params__max_tokens=100
    )

    assert [(request.request_id, request.sampling_params.max_tokens) for request in services.model.seen()] == [
        ("run-a/1/7/0/0", 100),
        ("run-a/1/7/0/1", 100),
        ("run-a/1/7/0/1+1", 96),
        ("run-a/1/7/0/1+2", 95),
    ]
    assert trajectory.stop_reason is StopReason.ANSWERED


@register("answers_twice_agent")
class AnswersTwiceAgent(AgentLoop):
    """Generates two answers and records their tokens as they stream; used only in tests."""

    pieces: ClassVar[list[GeneratePiece]] = []

    async def converse(self, episode: Episode, toolbox: Toolbox) -> StopReason:
        await self.begin(episode)
        for index in range(2):
            start = len(episode.response_ids)
            reason = await self.generate(episode, self.pieces.append)
            end = len(episode.response_ids)
            episode.turns.append(
                Turn(index=index, messages=[], response_start=start, response_end=end, finish_reason=reason)
            )
        return StopReason.ANSWERED


@pytest.mark.anyio
async def test_a_loop_is_told_the_tokens_of_a_turn_as_they_come_also_where_it_was_cut(
    services: AgentServices, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[str] = []

    def noted(what: str, deadline: Deadline | None = None) -> AbstractContextManager[object]:
        waited.append(what)
        return waits_for(what, deadline)

    monkeypatch.setattr("trackway.agent.loop.waits_for", noted)
    AnswersTwiceAgent.pieces.clear()
    services.model.scripts = {0: ["9+9" + END, *says(services, "####", "18" + END)]}

    [trajectory] = await services.run(group(agent_name="answers_twice_agent"))

    told = [(piece.token_ids, piece.finish_reason) for piece in AnswersTwiceAgent.pieces]
    parts = [services.model.encode(part) for part in ("9+9" + END, "####", "18" + END)]
    assert told == [(part, None) for part in parts]
    assert trajectory.response_ids == [*itertools.chain(*parts)]
    turns = [f"the rollout service, turn {turn}" for turn in range(2)]
    assert [what for what in waited if "turn" in what] == turns


@pytest.mark.anyio
@pytest.mark.parametrize("limit", ["sampling_params__max_tokens", "limits__max_response_length"])
@pytest.mark.parametrize(("tokens", "asked"), [(4, [4]), (5, [5, 1]), (6, [6, 2])])
async def test_a_turn_that_was_cut_ends_with_its_last_token(
    services: AgentServices, limit: str, tokens: int, asked: list[int]
) -> None:
    trajectory = await services.say(*says(services, "####", "1234" + END), **{limit: tokens})

    assert [request.sampling_params.max_tokens for request in services.model.seen()] == asked
    assert trajectory.response_ids == services.model.encode("####1234"[:tokens])
    assert [turn.finish_reason for turn in trajectory.turns] == ["length"]
    assert trajectory.error is None


@pytest.mark.anyio
async def test_the_text_of_all_turns_is_scored(services: AgentServices) -> None:
    turns = ["6*3 is #### 18\n" + call("counter"), "So it is." + call("other"), "I am sure."]

    trajectory = await services.say(*(turn + END for turn in turns))

    [scored] = [request for request in services.reward.requests if request.url.path.endswith("/score")]
    request = ScoreRequest.model_validate_json(scored.content)
    assert request.solution_str == "".join(turns)
    assert request.extra_info["turns"] == turns
    assert trajectory.reward is not None
    assert trajectory.reward.score == 1.0  # for the answer in the first turn


@pytest.mark.anyio
async def test_a_wrong_answer_of_the_rollout_service_is_an_error(services: AgentServices) -> None:
    choice = GenerateChoice(
        finish_reason="stop",
        token_ids=[5, 6],
        logprobs=ChoiceLogprobs(content=[TokenLogprob(token_id=5, logprob=-1.0)]),
        weight_versions=[WeightSpan(version=3, start=0, end=2)],
    )
    usage = Usage(prompt_tokens=1, completion_tokens=2, total_tokens=3)
    reply = GenerateReply(request_id="r", model="other", created=0, usage=usage, choices=[choice])
    services.rollout.faults = [answers(200, text=reply.model_dump_json())]

    trajectory = await services.say("a" + END)

    assert trajectory.error is not None
    assert trajectory.error.code is ErrorCode.INTERNAL
    assert trajectory.response_ids == []


def test_agents_are_described_by_the_first_line_of_their_docstring() -> None:
    described = {agent.name: agent.description for agent in agents()}

    assert described["single_turn_agent"] == "Single-turn: answers the prompt once, without tools."
    assert described["defective_agent"] == "Raises what nobody foresaw."


def test_rows_without_an_agent_name_are_answered_in_a_single_turn() -> None:
    assert agent_loop(None).agent_name == "single_turn_agent"


def test_an_unknown_agent_names_those_there_are() -> None:
    with pytest.raises(TrackwayError, match="'single_turn_agent', 'tool_agent'") as caught:
        agent_loop("unregistered")

    assert caught.value.code is ErrorCode.UNKNOWN_AGENT
