"""The routes of sessions: opening, rewarding and ending one, and the model that its agent calls."""

import asyncio
import re
import time
from collections.abc import Callable, Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Body, Depends, HTTPException, Request, Response

from trackway.agent.context import AgentContext
from trackway.agent.groups import Groups
from trackway.agent.sessions.fast_path import B, ModelCall, PassedOnRoute, session_of_request
from trackway.agent.sessions.graph import canonical
from trackway.agent.sessions.loop import OpenSession, opened
from trackway.agent.sessions.session import Session
from trackway.agent.sessions.store import Sessions, session_of
from trackway.chat.tokenizer import ChatTokenizer
from trackway.model_api.anthropic import AnthropicRoute, MessagesResponseBuilder, chat_of_messages
from trackway.model_api.choices import whole_or_stream
from trackway.model_api.openai.completions import ChatResponseBuilder, OpenAIRoute
from trackway.model_api.openai.responses import ResponsesBuilder, chat_of_response
from trackway.serving import ServiceRouter
from trackway.serving.auth import CALLER, Caller, RawHeaders, presented_key
from trackway.wire.anthropic import CountTokensReply, MessagesReply
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.openai import ChatCompletion, ChatRequest, Completion
from trackway.wire.responses import ResponsesReply
from trackway.wire.rollout import ModelCard, ModelList
from trackway.wire.sessions import (
    FinishedSession,
    SessionAccess,
    SessionCall,
    SessionChat,
    SessionCompletion,
    SessionMessages,
    SessionRequest,
    SessionResponse,
    SessionReward,
    SessionState,
    SessionTokenCount,
    TrainedSession,
)
from trackway.wire.trajectory import Reward, Trajectory

MODEL = "policy"
"""Name of the model in a session. Any other name is accepted too."""
_BASE = re.compile(r"/sessions/[^/]+(/v1)?")
_MODEL_PATH = re.compile(r"(/sessions/[^/]+)?/(v1/|(chat/)?completions$|responses$)")
_METHODS = ["DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"]
_ROUTES = (
    *("GET /v1/models", f"GET /v1/models/{MODEL}"),
    *("POST /v1/chat/completions", "POST /v1/completions", "POST /v1/responses"),
    *("POST /v1/messages", "POST /v1/messages/count_tokens"),
)
_WITHOUT_VERSION = ("/chat/completions", "/completions", "/responses")
"""Routes that OpenAI's clients call when their base URL lacks `/v1`."""
_SHOWN_CHARS = 200
_OPEN_S = 30.0
"""Longest wait for a session to begin."""


class OpenAISessionRoute(OpenAIRoute, PassedOnRoute):
    """A route of a session whose errors have OpenAI's format."""


class AnthropicSessionRoute(AnthropicRoute, PassedOnRoute):
    """A route of a session whose errors have Anthropic's format."""


class RunningSessions:
    """The sessions that were opened over HTTP, each with the task of its trajectory."""

    def __init__(self, services: AgentContext, groups: Groups) -> None:
        self._services, self._groups = services, groups
        self._tasks: dict[str, asyncio.Task[Trajectory]] = {}
        self._handing: dict[str, tuple[TrainedSession, asyncio.Task[None] | None]] = {}
        """The sessions that are trained, each with the hand-over of its trajectory to the run."""

    async def open(self, request: SessionRequest, opener: str) -> SessionAccess:
        """Begin a session of this caller. Raises OVERLOADED when the replica is full."""
        sessions = self._services.sessions
        sessions.make_room(opener)
        self._tasks = {name: task for name, task in self._tasks.items() if name in sessions}
        self._handing = {name: handing for name, handing in self._handing.items() if name in sessions}
        request = await self._of_run(request)
        ready: asyncio.Future[Session] = asyncio.get_running_loop().create_future()
        task = self._groups.launch(
            lambda services: OpenSession(services, request, opener, ready.set_result), request.group()
        )
        session = await opened(task, ready, _OPEN_S)
        if session is None:
            task.cancel()
            message = f"expected room for the session within {_OPEN_S:g} s (max_sessions), got none; try again"
            raise TrackwayError(ErrorCode.OVERLOADED, message)
        self._tasks[session.id] = task
        if request.train is not None:
            self._handing[session.id] = request.train, None
        return sessions.access(session)

    async def _of_run(self, request: SessionRequest) -> SessionRequest:
        """The request with what its run fixes. Raises CONFLICT when that run takes no sessions."""
        if request.train is None:
            return request
        group = request.train.group
        if group is None and request.sample.extra_info.get("index") is None:
            message = (
                "expected train.group or sample.extra_info.index, which tell the sessions of one task, got neither"
            )
            raise TrackwayError(ErrorCode.INVALID_REQUEST, f"{message}; give one")
        run = await self._services.trainer.session_run(request.train.run)
        train = TrainedSession(run=run.run, group=request.sample.index if group is None else group)
        return request.model_copy(update={**dict(run), "train": train})

    async def end(self, session: Session) -> Trajectory:
        """End the session, wait for its score, and hand it to the run that trains on it.

        Raises CONFLICT for one that belongs to a group. The run's error, when it does not take the session.
        """
        task = self._tasks.get(session.id)
        if task is None:
            message = "expected a session that was opened by POST /sessions, got one of a group, which its runner ends"
            raise TrackwayError(ErrorCode.CONFLICT, message)
        session.ended.set()
        trajectory = await asyncio.shield(task)
        train, handing = self._handing.get(session.id, (None, None))
        if train is None or trajectory.error is not None:
            return trajectory
        if handing is None or (handing.done() and (handing.cancelled() or handing.exception() is not None)):
            handing = asyncio.create_task(self._hand_over(session.id, train, trajectory))
            self._handing[session.id] = train, handing
        await asyncio.shield(handing)  # it goes on when the client has left
        return trajectory

    async def _hand_over(self, session_id: str, train: TrainedSession, trajectory: Trajectory) -> None:
        assert train.run is not None and train.group is not None
        finished = FinishedSession(session_id=session_id, group=train.group, trajectory=trajectory)
        await self._services.trainer.train_session(train.run, finished)

    def state(self, session: Session) -> SessionState:
        """The session so far."""
        task = self._tasks.get(session.id)
        return SessionState(
            session_id=session.id,
            ended=session.ended.is_set(),
            calls=session.graph.calls,
            attributes=session.attributes,
            ignored_fields=sorted(session.ignored_fields),
            nodes=session.graph.nodes,
            trajectory=task.result() if task is not None and task.done() and not task.cancelled() else None,
        )

    async def delete(self, session: Session) -> None:
        """Abort the session and forget it."""
        task = self._tasks.pop(session.id, None)
        self._handing.pop(session.id, None)
        session.close()
        self._services.sessions.forget(session)
        if task is not None:
            task.cancel("the session was deleted")
            await asyncio.wait({task})


async def _called(request: Request) -> Session:
    """The session of a call. A coroutine, since FastAPI runs plain functions in a thread."""
    sessions: Sessions = request.app.state.passing_on.sessions
    session = sessions.find(session_of_request(request.scope["path"], request.scope["headers"]) or "")
    session.note_headers(request.headers.raw)
    return session


Called = Annotated[Session, Depends(_called)]


def session_routes(services: AgentContext, groups: Groups) -> list[APIRouter]:
    """`/sessions`, and the model at `/sessions/{id}/v1` and, by the session's key alone, at `/v1`."""
    sessions, running = services.sessions, RunningSessions(services, groups)
    return [
        _opening(running),
        _session(sessions, running),
        *(
            router(at)
            for at in ("/sessions/{session_id}", "")
            for router in (_openai, _anthropic, _unknown_to_anthropic, _unknown_to_openai)
        ),
    ]


def _opening(running: RunningSessions) -> ServiceRouter:
    router = ServiceRouter(tags=["sessions"])

    @router.post("/sessions")
    async def open_session(request: SessionRequest, http: Request) -> SessionAccess:
        """Open a session: an agent that calls the model at its `base_url`, or with its `api_key`, is recorded."""
        return await running.open(request, http.scope[CALLER].name)

    return router


def _session(sessions: Sessions, running: RunningSessions) -> APIRouter:
    router = APIRouter(prefix="/sessions/{session_id}", tags=["sessions"], route_class=PassedOnRoute)

    @router.head("", include_in_schema=False)
    @router.head("/v1", include_in_schema=False)
    async def exists(session_id: str) -> None:
        """Return whether the session is known: Claude Code asks its base URL before it begins."""
        sessions.find(session_id)

    @router.post("/reward")
    async def reward(session_id: str, reward: SessionReward) -> None:
        """Score the session, or a call of it, before it ends. Otherwise the reward service is asked when it ends."""
        session = sessions.find(session_id)
        if session.ended.is_set():
            message = f"expected a reward before the end of session {session_id}, got one after it"
            raise TrackwayError(ErrorCode.CONFLICT, f"{message}; post it before /end, which returns the final score")
        if reward.call_id is not None:
            session.score_call(reward.call_id, reward.score)
            return
        session.episode.reward = Reward(score=reward.score, components=reward.components)

    @router.post("/end")
    async def end(session_id: str) -> Trajectory:
        """End the session. Returns its trajectory, scored."""
        return await running.end(sessions.find(session_id))

    @router.get("/trajectory")
    async def trajectory(session_id: str) -> SessionState:
        """The token graph so far, and the trajectory once the session has ended."""
        return running.state(sessions.find(session_id))

    @router.delete("")
    async def delete(session_id: str) -> None:
        """Abort the session. It leaves no trajectory."""
        await running.delete(sessions.find(session_id))

    return router


def _openai(at: str) -> APIRouter:
    """The model of a session, for OpenAI's clients."""
    router = APIRouter(prefix=at, tags=["model of a session"], route_class=OpenAISessionRoute)

    @router.get("/v1/models")
    async def models(session: Called) -> ModelList:
        """The session's model."""
        return ModelList(data=[_model_of(session)])

    @router.get("/v1/models/{model:path}")
    async def model(model: str, session: Called) -> ModelCard:
        """The session's model. 404 for any other name."""
        if model != MODEL:
            message = f"expected the model {MODEL!r}, got {model[:_SHOWN_CHARS]!r}; calls may name any"
            raise TrackwayError(ErrorCode.MODEL_NOT_FOUND, message, param="model")
        return _model_of(session)

    @router.post("/v1/chat/completions", response_model=None, responses=whole_or_stream(ChatCompletion))
    async def chat(body: Annotated[SessionChat, Body()], session: Called, request: Request) -> Response:
        """The next message of a conversation, with the run's sampling."""
        return await _chat(body, session, request)

    @router.post("/v1/completions", response_model=None, responses=whole_or_stream(Completion))
    async def completions(body: Annotated[SessionCompletion, Body()], session: Called, request: Request) -> Response:
        """Continue prompts. One that begins with an earlier prompt and its completion continues the recorded ids."""
        return await _completions(body, session, request)

    @router.post("/v1/responses", response_model=None, responses=whole_or_stream(ResponsesReply))
    async def responses(body: Annotated[SessionResponse, Body()], session: Called, request: Request) -> Response:
        """The next response of a conversation: the whole input, or what is new after `previous_response_id`."""
        return await _responses(body, session, request)

    return router


def _model_of(session: Session) -> ModelCard:
    limits = session.episode.limits
    longest = limits.max_prompt_length + limits.max_response_length
    return ModelCard(id=MODEL, created=int(time.time()), max_model_len=longest)


def _anthropic(at: str) -> APIRouter:
    """The model of a session, for Anthropic's clients."""
    router = APIRouter(prefix=at, tags=["model of a session"], route_class=AnthropicSessionRoute)

    @router.post("/v1/messages", response_model=None, responses=whole_or_stream(MessagesReply))
    async def messages(body: Annotated[SessionMessages, Body()], session: Called, request: Request) -> Response:
        """The next message of a conversation, with the run's sampling."""
        return await _messages(body, session, request)

    @router.post("/v1/messages/count_tokens")
    async def count_tokens(body: Annotated[SessionTokenCount, Body()], session: Called) -> CountTokensReply:
        """The number of tokens of a conversation. Recorded as an auxiliary call."""
        session.note_fields([*body.left_out.sampling, *body.left_out.ignored])
        return CountTokensReply(input_tokens=await session.count(chat_of_messages(body)))

    return router


def _unknown_to_anthropic(at: str) -> APIRouter:
    """Requests of Anthropic's clients beyond the routes."""
    router = APIRouter(prefix=at, route_class=AnthropicSessionRoute)
    for path in ("/v1/messages", "/v1/messages/{rest:path}", "/v1/v1/messages"):
        router.api_route(path, methods=_METHODS, include_in_schema=False)(_no_such_route)
    return router


def _unknown_to_openai(at: str) -> APIRouter:
    """Requests of OpenAI's clients beyond the routes."""
    router = APIRouter(prefix=at, route_class=OpenAISessionRoute)
    for path in ("/v1/{rest:path}", *_WITHOUT_VERSION):
        router.api_route(path, methods=_METHODS, include_in_schema=False)(_no_such_route)
    return router


async def _no_such_route(request: Request) -> None:
    path = request.scope["path"]
    route, remedy = path[path.find("/v1/") :], "call one of them"
    if "/v1/" not in path:
        route, remedy = path, "end the base URL of OpenAI's clients in /v1"
    elif route.startswith("/v1/v1/"):
        remedy = "leave /v1 out of the base URL of Anthropic's clients"
    message = f"expected {', '.join(_ROUTES)}, got {request.method} {route[:_SHOWN_CHARS]}; {remedy}"
    if methods := [known.split()[0] for known in _ROUTES if known.split()[1] == route]:
        raise HTTPException(405, message, {"allow": ", ".join(methods)})
    raise TrackwayError(ErrorCode.NOT_FOUND, message)


async def _chat(body: SessionChat, session: Session, request: Request) -> Response:
    said = _said("chat", session, body, session.chats.digest(body))
    chat = session.formatted(body, "response_format")
    return await session.answer(request, chat, ChatResponseBuilder, said, stream=body.stream)


async def _completions(body: SessionCompletion, session: Session, request: Request) -> Response:
    return await session.complete(request, body, _said("completions", session, body))


async def _responses(body: SessionResponse, session: Session, request: Request) -> Response:
    earlier = session.earlier(body.previous_response_id, keep_system=body.instructions is None)
    chat = session.formatted(chat_of_response(session.with_items(body), earlier), "text.format")

    def build(forced: ChatRequest, tokenizer: ChatTokenizer, prompt: list[int]) -> ResponsesBuilder:
        text = None if forced.response_format is None else body.text
        used = {"temperature": forced.temperature, "top_p": forced.top_p, "text": text}
        return ResponsesBuilder(body.model_copy(update=used), forced, tokenizer, prompt)

    return await session.answer(request, chat, build, _said("responses", session, body), stream=body.stream)


async def _messages(body: SessionMessages, session: Session, request: Request) -> Response:
    chat = session.formatted(chat_of_messages(body), "output_config.format")

    def build(forced: ChatRequest, tokenizer: ChatTokenizer, prompt: list[int]) -> MessagesResponseBuilder:
        return MessagesResponseBuilder(body, forced, tokenizer, prompt)

    return await session.answer(request, chat, build, _said("messages", session, body), stream=body.stream)


def _reader(kind: type[B]) -> Callable[[bytes, Session], B]:
    return lambda body, _: kind.model_validate_json(body)


MODEL_CALLS: Mapping[str, ModelCall[Any]] = {
    "chat/completions": ModelCall(lambda body, session: session.chats.read(body), _chat, OpenAISessionRoute),
    "completions": ModelCall(_reader(SessionCompletion), _completions, OpenAISessionRoute),
    "responses": ModelCall(_reader(SessionResponse), _responses, OpenAISessionRoute),
    "messages": ModelCall(_reader(SessionMessages), _messages, AnthropicSessionRoute),
}
"""The calls of a session's model, by their path behind `/v1/`, which are answered without FastAPI."""


def _said(route: str, session: Session, body: SessionCall, digest: str | None = None) -> str:
    """Key that a retry of the call repeats: another seed asks for another sample. Its fields without effect are noted.

    `digest` stands for the body without `stream`; by default its JSON.
    """
    sampling, ignored = body.left_out
    if sampling or ignored:
        session.note_fields([*sampling, *ignored])
    if digest is None:
        digest = body.model_dump_json(exclude={"stream", "stream_options"})
    return f"{route} {canonical({**sampling}) if sampling else ''} {digest}"


def guest(sessions: Sessions, method: str, path: str, headers: RawHeaders) -> Caller | None:
    """The caller of a session's model by its key, or None for another path or key: an agent does not score itself.

    A key for another replica's session is passed on there unread, with nothing but this call. A key whose session has
    gone lets its caller know that, and opens nothing else.
    """
    if _MODEL_PATH.match(path) is None and (method != "HEAD" or _BASE.fullmatch(path) is None):
        return None
    session_id, key = session_of_request(path, headers), presented_key(headers)
    if session_id is None or key is None or not key.startswith(f"sk-{session_id}-"):
        return None
    caller = Caller(f"session {session_id}", frozenset())
    if session_id in sessions:
        return caller if sessions.find(session_id).owns(key) else None
    return caller if session_of(key) == session_id else None
