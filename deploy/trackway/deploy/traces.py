"""Reading trajectories back from MLflow: searching by tag, and checking that each tree is whole."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel

from trackway.deploy.errors import UserError
from trackway.deploy.settings import Deployment
from trackway.wire.trajectory import Turn

if TYPE_CHECKING:
    from mlflow.entities import Span, Trace

SERVICE_OF_SPAN = {
    "trajectory": "agent",
    "turn": "agent",
    "chat": "rollout",
    "execute_tool": "tools",
    "reward": "reward",
}
"""Which service makes a span, by the first word of its name."""

_PAGE = 200


class TraceRow(BaseModel):
    """One trajectory's trace in a list."""

    trace_id: str
    name: str
    state: str
    tags: dict[str, str]
    duration_ms: int | None
    preview: str


def tag_filter(**tags: str | int | bool | None) -> str:
    """MLflow's filter for tags: `tags.step = '1' AND tags.validate = 'False'`; None leaves a tag out."""
    return " AND ".join(f"tags.{key} = '{value}'" for key, value in tags.items() if value is not None)


def search(mlflow_uri: str, experiments: Iterable[str], filter_string: str = "", limit: int = 100) -> list["Trace"]:
    """Traces of the experiments (by id) that match, newest first, their spans included."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=mlflow_uri)
    locations = list(experiments)
    found: list[Trace] = []
    token = None
    while len(found) < limit:
        page = client.search_traces(
            locations=locations,
            filter_string=filter_string or None,
            max_results=min(_PAGE, limit - len(found)),
            page_token=token,
        )
        found.extend(page)
        token = page.token
        if not token:
            break
    return found


def row(trace: "Trace") -> TraceRow:
    """A trace as a row."""
    info = trace.info
    tags = {key: value for key, value in info.tags.items() if not key.startswith("mlflow.")}
    name = info.tags.get("mlflow.traceName", "")
    preview = (info.response_preview or "")[:120]
    return TraceRow(
        trace_id=info.trace_id,
        name=name,
        state=str(info.state.value if hasattr(info.state, "value") else info.state),
        tags=tags,
        duration_ms=info.execution_duration,
        preview=preview,
    )


def missing_parts(trace: "Trace", turns: Sequence[Turn]) -> list[str]:
    """What a trajectory's trace lacks: empty for a whole tree.

    Whole: one root, no span whose parent is absent, as many turn and chat spans as assistant turns, as many
    execute_tool spans as calls that reached their tool, one reward; each made by its own service, and no two services
    by one process.
    """
    spans: list[Span] = list(trace.data.spans)
    kinds = [_kind(span) for span in spans]
    calls = sum(turn.calls_executed for turn in turns)
    expected = {"trajectory": 1, "turn": len(turns), "chat": len(turns), "execute_tool": calls, "reward": 1}
    problems = [
        f"{kinds.count(kind)} of {count} {kind} spans" for kind, count in expected.items() if kinds.count(kind) != count
    ]
    known = {span.span_id for span in spans}
    problems += [f"{span.name} has no parent" for span in spans if span.parent_id and span.parent_id not in known]
    processes: dict[str, set[str]] = {}
    for span, kind in zip(spans, kinds, strict=True):
        service = str(span.get_attribute("agentic.service"))
        if service != SERVICE_OF_SPAN.get(kind):
            problems.append(f"{span.name} was made by {service}")
        processes.setdefault(service, set()).add(str(span.get_attribute("agentic.process")))
    shared = [pid for pid in set().union(*processes.values()) if sum(pid in pids for pids in processes.values()) > 1]
    problems += [f"process {pid} served two services" for pid in shared]
    return problems


def _kind(span: "Span") -> str:
    return span.name.split(" ")[0]


def store_uri(outputs: Path) -> str:
    """MLflow of an outputs folder: its running server, else its database."""
    deployment = Deployment.load(outputs.resolve())
    if deployment and any(process.find() for process in deployment.processes):
        return deployment.mlflow_uri
    database = outputs.resolve() / "mlflow" / "mlflow.db"
    if not database.exists():
        raise UserError(f"no MLflow database in {outputs}; give --outputs the folder of a deployment or a demo")
    return f"sqlite:///{database}"


def experiment_ids(mlflow_uri: str, project: str | None) -> list[str]:
    """Ids of the experiments to look in: the named one, else all."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=mlflow_uri)
    experiments = list(client.search_experiments())
    found = [one.experiment_id for one in experiments if project in (None, one.name)]
    if not found:
        names = ", ".join(one.name for one in experiments)
        raise UserError(f"no MLflow experiment {project!r}; there are {names}")
    return found
