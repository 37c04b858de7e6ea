"""Agent loops whose agent calls the model through a session: the session's rows become the trajectory.

Each path of the token graph from a root to a leaf is a training row, and each sampled token trains once. A sampled node
is trained in the first path that holds it, and is context in the others. Auxiliary calls are left out, and so are
answers that reached no client, unless a later call continues them. Guided tokens are context: the learner has no
grammar, and gives them other probabilities than the engine did.
"""

import asyncio
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from trackway.agent.context import AgentContext
from trackway.agent.episode import Episode
from trackway.agent.loop import AgentLoop
from trackway.agent.sessions.graph import plain_message
from trackway.agent.sessions.session import Session, SessionEpisode
from trackway.agent.toolbox import Toolbox
from trackway.wire.chat import Message
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.sessions import FormatUse, GraphNode, NodeKind, SessionBounds, SessionRequest
from trackway.wire.trajectory import Reward, StopReason, TokenRow, Turn, WeightSpan


class TrainedTurn(NamedTuple):
    """Place of a sampled node in the response of a row."""

    node: GraphNode
    start: int
    end: int


class GraphRow(NamedTuple):
    """One path of the graph; fields as in Trajectory."""

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    response_logprobs: list[float]
    weight_versions: list[WeightSpan]
    turns: list[TrainedTurn]
    """The sampled nodes that are trained in this row, and the guided ones that no earlier row has."""
    nodes: list[GraphNode]


def training_rows(nodes: Sequence[GraphNode]) -> list[GraphRow]:
    """The rows of a graph, in the order in which their last turns were sampled. Empty without a sampled token."""
    continued: set[int] = set()
    for node in reversed(nodes):
        if node.kind is NodeKind.SAMPLED and (node.delivered or node.id in continued):
            continued.update(_ancestors(node, nodes))
    trained: set[int] = set()
    rows: list[GraphRow] = []
    for node in nodes:
        if node.kind is NodeKind.SAMPLED and node.delivered and node.id not in continued:
            path = [nodes[place] for place in (*reversed(_ancestors(node, nodes)), node.id)]
            row = _row(path, trained)
            if any(turn.node.ids for turn in row.turns):
                rows.append(row)
            trained |= {turn.node.id for turn in row.turns}
    return rows


def _ancestors(node: GraphNode, nodes: Sequence[GraphNode]) -> list[int]:
    """The nodes above this one, the root last."""
    above: list[int] = []
    while node.parent is not None:
        above.append(node.parent)
        node = nodes[node.parent]
    return above


def _row(path: Sequence[GraphNode], trained: set[int]) -> GraphRow:
    root, *rest = path
    row = GraphRow(root.ids, [], [], [], [], [], list(path))
    for node in rest:
        start = len(row.response_ids)
        is_new = node.kind is NodeKind.SAMPLED and node.id not in trained
        trains = is_new and not node.guided
        row.response_ids.extend(node.ids)
        row.response_mask.extend([int(trains)] * len(node.ids))
        row.response_logprobs.extend(node.logprobs if trains else [0.0] * len(node.ids))
        if trains:
            row.weight_versions.extend(span.moved(start) for span in node.weight_versions)
        if is_new:
            row.turns.append(TrainedTurn(node, start, len(row.response_ids)))
    return row


class SessionAgent(AgentLoop):
    """Opens a session, waits for its agent, and takes over the rows of its graph."""

    bounds = SessionBounds()
    formats: FormatUse = "guide"
    generates_alone = True
    episode_class = SessionEpisode
    opener: str | None = None
    """The caller that opened the session, or None for a session of a rollout."""

    @abstractmethod
    async def attend(self, session: Session) -> None:
        """Wait until the agent has ended. An exception fails the trajectory, unless a bound was reached."""

    async def converse(self, episode: Episode, toolbox: Toolbox) -> StopReason:
        """The session's life. Raises AGENT_FAILED, or its last error, when no call was answered."""
        sessions = self.services.sessions
        assert isinstance(episode, SessionEpisode)
        tokens = self.services.tokens
        session = Session(self.generate, tokens, episode, self.bounds, sessions.replica, self.formats)
        sessions.add(session, self.opener)
        try:
            await self.attend(session)
        except Exception:
            if session.limit is None:
                raise
        finally:
            session.close()
            sessions.ended(session)
            await self._take(session, episode)
        if not episode.response_ids:
            raise session.refused or session.failed or self._unanswered(session)
        return session.limit or StopReason.ANSWERED

    def _unanswered(self, session: Session) -> TrackwayError:
        calls = session.graph.calls
        got = f"none of its {calls} calls was answered" if calls else "made no call (one refused as invalid is none)"
        message = f"expected the agent to call the model at {self.services.sessions.access(session).base_url}"
        remedy = "let it use OPENAI_BASE_URL, ANTHROPIC_BASE_URL or the session's `base_url`, and read its output"
        return TrackwayError(ErrorCode.AGENT_FAILED, f"{message}, it ended and {got}; {remedy}")

    async def _take(self, session: Session, episode: SessionEpisode) -> None:
        session.graph.settle()
        paths = training_rows(session.graph.nodes)
        rows = [await self._row(path, session.messages) for path in paths]
        if rows:
            first, *episode.further_rows = rows
            episode.prompt_ids, episode.turns = first.prompt_ids, first.turns
            episode.response_ids, episode.response_mask = first.response_ids, first.response_mask
            episode.response_logprobs, episode.weight_versions = first.response_logprobs, first.weight_versions
            said = session.conversation
            episode.said = None if said is None else [*map(plain_message, said)]
            episode.user_turns = sum(node.kind is NodeKind.OBSERVATION for node in session.graph.nodes)
        scores = {node.call: node.reward for node in session.graph.nodes if node.reward is not None}
        if scores and episode.reward is None:
            components = {f"call/{call}": score for call, score in scores.items()}
            # What is not at a trained turn stands at the last token.
            turns = [turn.node for path in paths for turn in path.turns]
            by_turn = [0.0 if node.guided else node.reward or 0.0 for node in turns]
            episode.reward = Reward(score=sum(scores.values()), components=components, turn_scores=by_turn)

    async def _row(self, row: GraphRow, messages: Mapping[int, Message]) -> TokenRow:
        return TokenRow(
            prompt_ids=row.prompt_ids,
            response_ids=row.response_ids,
            response_mask=row.response_mask,
            response_logprobs=row.response_logprobs,
            weight_versions=row.weight_versions,
            turns=await self._turns(row, messages),
        )

    async def _turns(self, row: GraphRow, given: Mapping[int, Message]) -> list[Turn]:
        """The model's messages in a row, with the text between them as what answered them."""
        tokens, turns = self.services.tokens, list[Turn]()
        for place, (node, start, end) in enumerate(row.turns):
            said = given.get(node.id)
            if said is None:  # a text completion
                said = Message(role="assistant", content=await tokens.turn_text(node.ids))
            behind = row.turns[place + 1].start if place + 1 < len(row.turns) else end
            answer = await tokens.text(row.response_ids[end:behind])
            messages = [said]
            messages += [Message(role="tool", content=answer)] if answer else []
            turns.append(
                Turn(
                    index=node.call,
                    messages=messages,
                    response_start=start,
                    response_end=end,
                    finish_reason=node.finish_reason or "stop",
                    guided=node.guided,
                )
            )
        return turns


class OpenSession(SessionAgent):
    """A session that its own client ends."""

    agent_name = "session"

    def __init__(
        self, services: AgentContext, request: SessionRequest, opener: str, opened: Callable[[Session], None]
    ) -> None:
        super().__init__(services)
        self.bounds, self.formats, self.opener = request.bounds, request.formats, opener
        self._opened = opened

    async def attend(self, session: Session) -> None:
        """Until the session is ended."""
        self._opened(session)
        await session.until_ended()


async def opened(task: "asyncio.Task[object]", session: "asyncio.Future[Session]", within_s: float) -> Session | None:
    """The session once its task has opened it, or None when the task ended before, or the time has passed."""
    await asyncio.wait({task, session}, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
    return session.result() if session.done() else None
