"""Everything that goes wrong on the way of a trajectory, and what is to be seen of it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import StatusCode

from tests.services.agent.agent_services import AgentServices, call
from tests.services.agent.replaceable import answers, breaks
from tests.services.agent.scripted_model import END
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.trajectory import Incident

COUNT = call("counter") + END
ANSWER = "#### 18" + END
RAISE = call("counter", '{"raise": true}') + END
REFUSE = call("counter", '{"refuse": true}') + END
BUSY = TrackwayError(ErrorCode.OVERLOADED, "expected a free place").to_reply().model_dump(mode="json")


@dataclass
class Seen:
    """What a trace says of how its trajectory went."""

    outcome: str
    incidents: str | None = None
    events: dict[str, list[str]] = field(default_factory=dict)
    """Names of the events by the span's name, where there are any."""
    failed: list[str] = field(default_factory=list)
    """Names of the spans with status ERROR."""


def seen(spans: list[ReadableSpan]) -> Seen:
    """Read the one trace that these spans are."""
    [root] = [span for span in spans if span.parent is None]
    tags = root.attributes or {}
    events: dict[str, list[str]] = {}
    for span in spans:
        if span.events:
            events.setdefault(span.name, []).extend(event.name for event in span.events)
    incidents = tags.get("agentic.tag.incidents")
    return Seen(
        outcome=str(tags["agentic.tag.outcome"]),
        incidents=None if incidents is None else str(incidents),
        events=events,
        failed=sorted(span.name for span in spans if span.status.status_code is StatusCode.ERROR),
    )


async def too_late(services: AgentServices) -> str:
    """The tool server's replica was lost while the model wrote."""
    services.new_tool_server()
    return COUNT


async def cut(services: AgentServices) -> str:
    services.model.finish_reason = "abort"
    return "#### "


async def rest(services: AgentServices) -> str:
    services.model.finish_reason = None
    return "18" + END


def reward_is_busy_once(services: AgentServices) -> None:
    services.reward.faults = [answers(429, json=BUSY)]


def gateway_gives_up_once(services: AgentServices) -> None:
    services.reward.faults = [answers(408, text="Request timeout")]


def replica_is_dead_once(services: AgentServices) -> None:
    services.rollout.faults = [answers(500, text="Internal Server Error")]  # what Ray Serve answers for it


def connection_breaks_once(services: AgentServices) -> None:
    services.rollout.faults = [breaks(httpx.RemoteProtocolError("server disconnected"))]


def silence_once(services: AgentServices) -> None:
    services.rollout.faults = [breaks(httpx.ReadTimeout("no answer"))]


def tool_is_slow(services: AgentServices) -> None:
    services.slow_tool_server(call_timeout_s=0.05)


def weights_are_published(services: AgentServices) -> None:
    services.publish_weights(9)


def tool_cannot_let_go(services: AgentServices) -> None:
    async def refuse(instance_id: str) -> None:
        raise RuntimeError("cannot let go")

    services.counter.release = refuse  # pyright: ignore[reportAttributeAccessIssue]


def no_tool_server(services: AgentServices) -> None:
    services.tools.app = None


def nothing(services: AgentServices) -> None:
    """The model's words are enough."""


Words = str | Callable[[AgentServices], Any]


@dataclass
class BadPath:
    """What goes wrong, and what is to be seen of it."""

    seen: Seen
    says: list[Words] = field(default_factory=lambda: [ANSWER])
    prepare: Callable[[AgentServices], None] = nothing
    incidents: list[Incident] = field(default_factory=list)
    error: ErrorCode | None = None
    asked: dict[str, Any] = field(default_factory=dict)


RETRIED, LOST, BEHIND = Incident.RETRIED, Incident.REPLICA_LOST, Incident.WEIGHTS_BEHIND
FAILED, CUT = Incident.TOOL_FAILED, Incident.GENERATION_CUT
TOOL = "execute_tool counter"
PATHS = {
    "a busy service": BadPath(
        Seen("retried", "retried", {"trajectory": ["retried"]}),
        prepare=reward_is_busy_once,
        incidents=[RETRIED],
    ),
    "a gateway that gave up": BadPath(
        Seen("retried", "retried", {"trajectory": ["retried"]}),
        prepare=gateway_gives_up_once,
        incidents=[RETRIED],
    ),
    "a silent service": BadPath(
        Seen("retried", "retried", {"turn 0": ["retried"]}),
        prepare=silence_once,
        incidents=[RETRIED],
    ),
    "a dead replica": BadPath(
        Seen("replica_lost", "replica_lost", {"turn 0": ["replica_lost"]}),
        prepare=replica_is_dead_once,
        incidents=[LOST],
    ),
    "a broken connection": BadPath(
        Seen("replica_lost", "replica_lost", {"turn 0": ["replica_lost"]}),
        prepare=connection_breaks_once,
        incidents=[LOST],
    ),
    "a tool that raises": BadPath(
        Seen("tool_failed", "tool_failed", {"turn 0": ["tool_failed"], TOOL: ["exception"]}, [TOOL]),
        [RAISE, ANSWER],
        incidents=[FAILED],
    ),
    "a tool that refuses": BadPath(
        Seen("tool_failed", "tool_failed", {"turn 0": ["tool_failed"], TOOL: ["exception"]}, [TOOL]),
        [REFUSE, ANSWER],
        incidents=[FAILED],
    ),
    "a tool past its time": BadPath(
        Seen("tool_timeout", "tool_timeout", {"turn 0": ["tool_timeout"], TOOL: ["exception"]}, [TOOL]),
        [COUNT, ANSWER],
        tool_is_slow,
        [Incident.TOOL_TIMEOUT],
    ),
    "a lost instance": BadPath(
        Seen("instance_lost", "instance_lost", {"turn 1": ["instance_lost"]}),
        [COUNT, too_late, ANSWER],
        incidents=[Incident.INSTANCE_LOST],
    ),
    "a replica that catches up": BadPath(
        Seen("weights_behind", "weights_behind", {"chat tiny": ["weights_behind"]}),
        prepare=weights_are_published,
        incidents=[BEHIND],
        asked={"min_weight_version": 9},
    ),
    "a generation that was cut": BadPath(
        Seen("generation_cut", "generation_cut", {"turn 0": ["generation_cut"]}),
        [cut, rest],
        incidents=[CUT],
    ),
    "several at once": BadPath(
        Seen(
            "replica_lost",
            "generation_cut,replica_lost,tool_failed",
            {"turn 0": ["replica_lost", "tool_failed"], TOOL: ["exception"], "turn 1": ["generation_cut"]},
            [TOOL],
        ),
        [RAISE, cut, rest],
        replica_is_dead_once,
        [CUT, LOST, FAILED],
    ),
    "a service that stays down": BadPath(
        Seen("error:unavailable", "replica_lost", {"trajectory": ["replica_lost"]}, ["trajectory"]),
        prepare=no_tool_server,
        incidents=[LOST],
        error=ErrorCode.UNAVAILABLE,
    ),
    "an instance that is not given back": BadPath(
        Seen("ok", events={"trajectory": ["not_given_back"]}),
        [COUNT, ANSWER],
        tool_cannot_let_go,
    ),
    "what the model did wrong": BadPath(
        Seen(
            "ok",
            events={"turn 0": ["unknown_function"], "turn 1": ["malformed_call"], "turn 2": ["call_not_run"]},
        ),
        [call("add") + END, call("counter", '{"a": }') + END, call("counter") + COUNT, ANSWER],
    ),
    "nothing": BadPath(Seen("ok")),
}
