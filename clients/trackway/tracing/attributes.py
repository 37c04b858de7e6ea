"""Attribute and header names of spans and of the backends; no other module spells them out.

A span holds each fact once: under its GenAI or OpenTelemetry name if there is one, else under `agentic.*`.
`export.translation` makes from them what a backend reads. Keys must form a tree (no key a prefix of another): Weave
rejects a span otherwise.
"""

from collections.abc import Collection
from enum import StrEnum

from trackway.wire.trajectory import Incident, Tags

KIND = "agentic.kind"
"""A SpanKind."""
INPUTS = "agentic.inputs"
"""JSON: `{"messages": [...]}` on a trajectory and a generation, a tool's arguments, anything elsewhere."""
OUTPUTS = "agentic.outputs"
"""JSON: `{"messages": [...], ...}` on a trajectory and a generation, a tool's result, anything elsewhere."""
TEXTS = "texts"
"""MLflow's name for the `messages` of a generation."""
TAG = "agentic.tag."
"""Prefix of a tag of the trace, on its root."""
TITLE = "agentic.title"
"""Short name of the trace in a list, on its root."""
GROUP = "agentic.group"
"""The GRPO group, on the root."""
WANDB_RUN = "agentic.wandb_run"
"""W&B run of the trace, on its root."""
SERVICE = "agentic.service"
"""Service that made the span. As the resource's `service.name` it would be an MLflow tag that services overwrite."""
PROCESS = "agentic.process"
"""Operating-system pid of the process that made the span."""
TRAJECTORY_ID = "agentic.trajectory"
"""On every span of a trajectory."""
TURN_INDEX = "agentic.turn"
WEIGHT_VERSION = "agentic.weight_version"
STOP_REASON = "agentic.stop_reason"
ERROR_TYPE = "error.type"

MLFLOW_TAG = "mlflow.traceTag."
"""Prefix of a root attribute that becomes an MLflow trace tag (MLflow >= 3.13)."""
MLFLOW_TRACE_NAME = "mlflow.traceTag.mlflow.traceName"
MLFLOW_SPAN_TYPE = "mlflow.spanType"
MLFLOW_INPUTS = "mlflow.spanInputs"
MLFLOW_OUTPUTS = "mlflow.spanOutputs"
MLFLOW_COST = "mlflow.llm.cost"
"""JSON. `{}` on a generation, for which MLflow otherwise searches all its price lists by the model's name."""
MLFLOW_EXPERIMENT_HEADER = "x-mlflow-experiment-id"
MLFLOW_RUN_HEADER = "x-mlflow-run-id"
"""On the request that carries a root: the trace then belongs to that run (MLflow >= 3.14)."""
WEAVE_KEY_HEADER = "wandb-api-key"
WEAVE_PROJECT_HEADER = "project_id"

WEAVE_KIND = "weave.span.kind"
WEAVE_ATTRIBUTE = "wandb.attributes."
"""Prefix of an attribute that becomes a filterable attribute of a Weave call."""
WEAVE_DISPLAY_NAME = "wandb.display_name"
WANDB_RUN_ID = "wandb.wb_run_id"
WANDB_RUN_STEP = "wandb.wb_run_step"

SESSION_ID = "session.id"
CONVERSATION_ID = "gen_ai.conversation.id"
OPERATION = "gen_ai.operation.name"
AGENT_NAME = "gen_ai.agent.name"
MODEL = "gen_ai.request.model"
PROVIDER = "gen_ai.provider.name"
PROVIDER_NAME = "trackway"
TEMPERATURE = "gen_ai.request.temperature"
MAX_TOKENS = "gen_ai.request.max_tokens"
TOP_P = "gen_ai.request.top_p"
TOP_K = "gen_ai.request.top_k"
SEED = "gen_ai.request.seed"
STREAM = "gen_ai.request.stream"
STOP_SEQUENCES = "gen_ai.request.stop_sequences"
OUTPUT_TYPE = "gen_ai.output.type"
"""`json` for a generation guided by a grammar; only there."""
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"
FIRST_CHUNK = "gen_ai.response.time_to_first_chunk"
"""Seconds; of a stream."""
RESPONSE_ID = "gen_ai.response.id"
RESPONSE_MODEL = "gen_ai.response.model"
FINISH_REASONS = "gen_ai.response.finish_reasons"
TOOL_NAME = "gen_ai.tool.name"
TOOL_CALL_ID = "gen_ai.tool.call.id"
EVALUATION_NAME = "gen_ai.evaluation.name"
EVALUATION_SCORE = "gen_ai.evaluation.score.value"
EVALUATION_RESULT = "gen_ai.evaluation.result"
"""An event."""
INPUT_MESSAGES = "gen_ai.input.messages"
OUTPUT_MESSAGES = "gen_ai.output.messages"
SYSTEM_INSTRUCTIONS = "gen_ai.system_instructions"
TOOL_DEFINITIONS = "gen_ai.tool.definitions"
COMPACTED = "gen_ai.conversation.compacted"
TOOL_TYPE = "gen_ai.tool.type"
TOOL_ARGUMENTS = "gen_ai.tool.call.arguments"
TOOL_RESULT = "gen_ai.tool.call.result"
OPENINFERENCE_KIND = "openinference.span.kind"

OUTCOME = "outcome"
"""Tag: `ok`, the gravest incident that was recovered from, `aborted`, or `error:<code>`."""
INCIDENTS = "incidents"
"""Tag: every incident, comma-separated; only when there was one."""
IS_BASELINE = "is_baseline"
"""Tag of a greedy rollout whose score is the baseline of its group; only there."""
POLICY = "policy"
"""Tag: the policy of the rollout service that the trajectory asked; only where it is not the default one."""
TRAIN_STEP = "train_step"
"""Tag of the trainer's own traces. They have no `step`, so `tags.step = '1'` matches trajectories only."""


class SpanKind(StrEnum):
    """A kind of work."""

    TRAJECTORY = "trajectory"
    TURN = "turn"
    CHAT = "chat"
    TOOL = "tool"
    REWARD = "reward"
    OPERATION = "operation"
    TRAIN_STEP = "train_step"
    OPTIMIZER_STEP = "optimizer_step"


Tag = str | int | bool | float


def group_id(tags: Tags) -> str:
    """`<experiment>/<step>/<sample_index>`: the GRPO group, which is the session of a trace; `val` marks validation."""
    step = f"val{tags.step}" if tags.validation else str(tags.step)
    return f"{tags.experiment_name}/{step}/{tags.sample_index}"


def display_name(tags: Tags) -> str:
    """Short name of a trace in a list: `s3/i17/n2`, or `val3/i17/n0`."""
    step = "val" if tags.validation else "s"
    return f"{step}{tags.step}/i{tags.sample_index}/n{tags.rollout_n}"


def gravest(incidents: Collection[Incident]) -> Incident | None:
    """The gravest incident, which is the last in the enumeration's order, or None without incidents."""
    return max(incidents, key=list(Incident).index, default=None)
