"""Failures in the row of a trajectory, as SQL, and the service of each."""

import re
from typing import get_args

from trackway.learner.filtering import INFRASTRUCTURE
from trackway.wire.errors import ERRORS, ErrorCode, ModelSees
from trackway.wire.health import ServiceName
from trackway.wire.tracing import Incident

_CODE = "json_extract_string(error, '$.code')"
_SEEN = ", ".join(f"'{code}'" for code, spec in ERRORS.items() if spec.model_sees is ModelSees.YES)
_FAILED = "error <> 'null'"
_ENDED_BY = (
    "json_extract_string([call FOR call IN json_extract(turns, '$[*].calls[*]') IF "
    f"json_extract_string(call, '$.error') = {_CODE} AND {_CODE} NOT IN ({_SEEN})][-1], '$.tool')"
)
"""The tool whose call ended the rollout."""
_CALL_CODE = "json_extract_string(call, '$.error')"
CALL_MESSAGE = "coalesce(json_extract_string(call, '$.message'), '')"
_CALL_CODES = "json_extract_string(turns, '$[*].calls[*].error')"
IS_INCIDENT = (
    f"incident IS DISTINCT FROM {_CODE} AND NOT list_contains({_CALL_CODES}, incident) AND NOT (incident = "
    f"'{Incident.TOOL_FAILED}' AND len([code FOR code IN {_CALL_CODES} IF code <> '{Incident.TOOL_TIMEOUT}']) > 0)"
)
"""True if an `incident` of a row is no failure of one of its calls or of the rollout."""
CALLED = "CAST(CAST(incident_services AS JSON) AS MAP(VARCHAR, VARCHAR[]))[incident]"
"""Services that were called at an `incident` of a row. Null where the row does not say."""
FAILURES = {
    "trajectory": (
        f"{_CODE} AS code, {_ENDED_BY} AS tool, json_extract_string(error, '$.message') AS message, '' AS called",
        _FAILED,
    ),
    "call": (
        f"{_CALL_CODE} AS code, json_extract_string(call, '$.tool') AS tool, {CALL_MESSAGE} AS message, '' AS called",
        f"{_CALL_CODE} IS NOT NULL AND NOT ({_FAILED} AND {_CALL_CODE} = {_CODE} AND {_CALL_CODE} NOT IN ({_SEEN}))",
    ),
    "incident": (
        "incident AS code, NULL AS tool, '' AS message, service AS called",
        IS_INCIDENT,
    ),
}
"""Code, tool, message and called service of each kind of failure, and its condition. A failure has one kind: a call
that ended its rollout is the rollout's, and what a call or a rollout failed by is no incident of it."""


def pattern_of(message: str) -> str:
    """SQL of what messages of one cause have in common: the first 300 characters, with N for each number."""
    return f"regexp_replace(left({message}, 300), '[0-9]+([.][0-9]+)?', 'N', 'g')"


_AT = re.compile(rf"\b({'|'.join(get_args(ServiceName))})\b")
_BY_CODE = {
    "rollout": (
        ErrorCode.ENGINE_FAILED,
        ErrorCode.WEIGHTS_BEHIND,
        ErrorCode.WEIGHTS_CORRUPT,
        ErrorCode.WEIGHTS_STALE,
        ErrorCode.PAUSED,
    ),
    "tools": (ErrorCode.INSTANCE_LOST, ErrorCode.INSTANCE_NOT_FOUND, ErrorCode.TOOL_FAILED, ErrorCode.TOOL_TIMEOUT),
    "agent": (ErrorCode.AGENT_FAILED,),
    "reward": (ErrorCode.UNKNOWN_DATA_SOURCE,),
}
_INCIDENTS: dict[str, str] = {
    Incident.GENERATION_CUT: "rollout",
    Incident.WEIGHTS_BEHIND: "rollout",
    Incident.PROMPT_CUT: "agent",
    Incident.TOOL_FAILED: "tools",
    Incident.TOOL_TIMEOUT: "tools",
    Incident.INSTANCE_LOST: "tools",
}
_INFRASTRUCTURE_INCIDENTS = frozenset(
    {Incident.RETRIED, Incident.WEIGHTS_BEHIND, Incident.INSTANCE_LOST, Incident.REPLICA_LOST}
)
"""A turn is cut on purpose when weights change, and a prompt and a tool are the run's own."""


def is_infrastructure(kind: str, code: str) -> bool:
    """Return whether a service, a machine or the network failed."""
    return code in (_INFRASTRUCTURE_INCIDENTS if kind == "incident" else INFRASTRUCTURE)


def service_of(kind: str, code: str, tool: str | None, message: str, called: str) -> str:
    """The service that failed: the called one, or by the code if it says so, else the first that the message names."""
    if kind == "incident":
        return called or _INCIDENTS.get(code, "")
    if tool is not None:
        return "tools"
    for service, codes in _BY_CODE.items():
        if code in codes:
            return service
    named = _AT.search(message)
    return named[1] if named else ""
