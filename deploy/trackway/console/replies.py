"""The JSON replies of the console's routes. Numbers that are not finite are null, which a chart leaves out."""

from pydantic import Field, JsonValue

from trackway.evaluation.summary import Estimate, Evaluation
from trackway.wire.base import WireReply
from trackway.wire.chat import Message, ToolSchema
from trackway.wire.errors import ErrorBody
from trackway.wire.reward import ScorerInfo
from trackway.wire.service import Wait
from trackway.wire.trainer import BackendSummary, RunState, TraceSummary
from trackway.wire.trajectory import Reward, Turn, WeightSpan


class Series(WireReply):
    """The values of a metric."""

    steps: list[int] = Field(default_factory=list[int])
    values: list[float | None] = Field(default_factory=list[float | None])


class RunSummary(WireReply):
    """A run in the list of runs."""

    key: str
    """Its folder below the outputs folder, `demo/seed0`. Names the run in every other route."""
    name: str
    state: RunState
    alive: bool | None = None
    """True if its process runs. None for a run that has ended."""
    step: int = 0
    total_steps: int = 0
    restarts: int = 0
    policy: str | None = None
    """Policy of the rollout service that it trains. None is the default one."""
    message: str = ""
    changed: int = 0
    """When its state changed last, in milliseconds since 1970. 0 if unknown."""
    reward: Series = Field(default_factory=Series)
    """Mean reward of each step."""
    accuracy: Series = Field(default_factory=Series)
    """The first validation accuracy of the steps that validated."""
    failed: int = 0
    """Trajectories with an error, validation included."""
    seconds: float | None = None
    """Seconds of its steps so far, or None if not recorded."""
    tokens: int | None = None
    """Tokens of its steps so far, prompts included, or None if not recorded."""
    gpu_seconds: float | None = None
    """`seconds` times the GPUs of its configuration, or None without GPUs there."""


class RunSummaries(WireReply):
    """A page of the runs, the newest first."""

    outputs: str
    total: int
    runs: list[RunSummary]


class TrajectoryFile(WireReply):
    """A file of trajectories."""

    step: int
    validation: bool
    bytes: int


class RunPage(WireReply):
    """A run, what it waits for, and which metrics and steps it has."""

    summary: RunSummary
    folder: str
    waits: list[Wait] = Field(default_factory=list[Wait])
    rollouts: dict[str, int] = Field(default_factory=dict)
    """Rollouts by state."""
    metrics: dict[str, float | None] = Field(default_factory=dict)
    """The newest value of each metric."""
    files: list[TrajectoryFile] = Field(default_factory=list[TrajectoryFile])
    """In the order of the steps, validation after training."""
    mlflow: str | None = None
    """Its page of traces in MLflow."""
    weave: str | None = None
    """Its page of traces in Weave."""
    evaluation: Evaluation | None = None
    """Null for a run that trains."""
    traces: TraceSummary | None = None
    tracking: list[BackendSummary] = Field(default_factory=list[BackendSummary])


class RunConfiguration(WireReply):
    """The resolved configuration of a run."""

    values: dict[str, JsonValue]
    """The configuration as nested keys. Empty if it cannot be read."""


class Metrics(WireReply):
    """Metrics by name."""

    series: dict[str, Series]


class StepPage(WireReply):
    """The rollouts of a step by column: item i of each list belongs to rollout i."""

    step: int
    validation: bool
    total: int
    """Rollouts of the step. The lists may hold fewer."""
    offset: int
    """Rollouts of the step before the first one of the lists."""
    sample_index: list[str]
    rollout_n: list[int]
    score: list[float | None]
    advantage: list[float | None]
    """Mean of the tokens' advantages, in a step without rewards whose token values are on disk."""
    stop_reason: list[str | None]
    error: list[str | None]
    """Code of the error that ended the rollout."""
    num_turns: list[int]
    tokens: list[int]
    """Tokens of the response."""
    seconds: list[float | None]
    """Seconds of the whole rollout."""
    parts: dict[str, list[float | None]]
    """Seconds of each activity. The rest is queues, parsing and the network."""
    incidents: list[int]
    """Number of problems from which the rollout recovered."""
    traced: list[bool]
    is_baseline: list[bool]
    """True if it is the greedy rollout of its group (ReMax), which no mean of the training counts."""
    prompts: dict[str, str]
    """The beginning of the last user message, by sample index."""


class TrajectoryAddress(WireReply):
    """Names a trajectory of a run."""

    step: int
    validation: bool
    sample: str
    rollout: int


class GroupMember(WireReply):
    """A rollout of the same prompt and step."""

    rollout: int
    score: float | None
    advantage: float | None
    """Mean of its tokens' advantages, in a step without rewards."""
    error: str | None
    """Code of the error that ended it."""
    is_baseline: bool
    """True if it is the greedy rollout, the group's baseline."""


class TrajectoryPage(WireReply):
    """A trajectory without its tokens."""

    id: str
    address: TrajectoryAddress
    previous: TrajectoryAddress | None
    next: TrajectoryAddress | None
    group: list[GroupMember]
    """The rollouts of its prompt, itself included, in the order of their numbers."""
    agent_name: str
    data_source: str
    stop_reason: str
    num_turns: int
    prompt_messages: list[Message]
    turns: list[Turn]
    reward: Reward | None
    ground_truth: str | None
    tool_rewards: list[float]
    timings: dict[str, float]
    """Seconds in total, and of each activity."""
    incidents: list[str]
    incident_services: dict[str, list[str]]
    """Services whose calls had incidents."""
    weight_versions: list[WeightSpan]
    error: ErrorBody | None
    log: str
    prompt_tokens: int
    response_tokens: int
    model_tokens: int
    """Tokens of the response that the model wrote, mask 1."""
    rows: int
    """Rows of tokens. Most trajectories have one."""
    trace: str | None
    """Page of its trace in MLflow. None when it was not traced, or MLflow is unknown."""
    weave: str | None
    """Page of its trace in Weave. None when it was not traced there."""
    trace_id: str | None
    span_id: str | None
    shortened: bool
    """True if a text was cut to the console's limit."""


class RankedToken(WireReply):
    """A token with a remarkable value."""

    place: int
    """In the row, its prompt included."""
    id: int
    piece: str | None
    value: float


class TokensPage(WireReply):
    """Tokens of one row of a trajectory, prompt and response, by column."""

    row: int
    rows: int
    total: int
    """Tokens of the row. The lists may hold fewer."""
    offset: int
    prompt_tokens: int
    ids: list[int]
    pieces: list[str] | None
    """The text of each token, or None without the run's tokenizer on this machine."""
    mask: list[int]
    """1 for the model's tokens, which are trained. 0 for others, the prompt included."""
    logprobs: list[float | None]
    """The sampler's, in nats, or None for tokens that were not sampled."""
    versions: list[int | None]
    """Weight version that sampled the token."""
    teacher: list[float | None]
    """The teacher's logprobs, in nats, or None for tokens that the model did not write. Empty without a teacher."""
    learner: "LearnerTokens | None"
    """None without `trackway.save_token_values`, for validation, and before the update."""
    ranked: list[RankedToken]
    """The tokens of the whole row with the most remarkable values of what was asked for, the first of them first."""
    unreadable: str
    """Why the learner's file cannot be read. Empty if it can."""


class LearnerTokens(WireReply):
    """Values that the update computed of the same tokens, by column, or null where it computed none."""

    status: str
    """`used`, or why the trajectory was not trained on. The columns are then empty."""
    logprobs: list[float | None]
    entropies: list[float | None]
    advantages: list[float | None]
    clipped: list[bool]
    """True if the probability ratio left the clip range where PPO's loss has no gradient."""
    kept: list[bool]
    """True if the token is in the loss: a token of the model that no rejection left out."""


class Hit(WireReply):
    """A trajectory that a search found."""

    address: TrajectoryAddress
    score: float | None
    stop_reason: str
    error: str | None
    tools: list[str]
    snippet: str
    """Text around the first match, or the end of the conversation without a text to search."""
    match: str
    """Match, as the snippet has it. Empty without a text to search."""


class SearchPage(WireReply):
    """Hits of a search, the newest step first."""

    hits: list[Hit]
    files: int
    """Files searched for this page."""
    cursor: str | None
    """Continues the search. None at its end."""
    unreadable: list[str]
    """Files that could not be read."""


class PromptRollout(WireReply):
    """A rollout of one prompt."""

    step: int
    rollout: int
    score: float | None
    is_baseline: bool
    """True if it is the greedy rollout of its group (ReMax), which no mean of the training counts."""
    stop_reason: str
    error: str | None
    seconds: float | None
    answer: str
    """The beginning of its last message."""


class PromptPage(WireReply):
    """The rollouts of one sample in all steps, or in all validations."""

    sample: str
    validation: bool
    prompt: str
    rollouts: list[PromptRollout]
    """In the order of steps and rollouts."""
    truncated: bool
    """True if there are too many: the list has the newest, and older files were not read."""
    unreadable: list[str]
    """Files that could not be read."""
    files: int
    """Files of the run."""
    files_left: int
    """Files that were not read yet: ask again, which goes on there."""


class Failure(WireReply):
    """Failures with one kind, code, service and message. Numbers in the message may differ."""

    kind: str
    """`trajectory` for an error that ended a rollout, `call` for a failed tool call, `incident` for a problem from
    which a rollout recovered."""
    code: str
    tool: str | None
    message: str
    """One of the messages. Empty for incidents, which have none."""
    pattern: str
    """Common beginning of its messages, N for numbers, which search takes as `message`."""
    infrastructure: bool
    """True if a service, a machine or the network failed, and not the row, the agent loop or the tool itself."""
    service: str
    """Services where it failed, as its row, code or message says. Several where none says which, empty for none."""
    called: str
    """For an incident of a call the service as its rows have it, which search takes as `service`. Empty for others."""
    count: int
    rollouts: int
    """Rollouts that have one. A rollout may have several failed calls."""
    steps: Series
    """Failures by step of training."""
    validation: int
    """Number of them in validations."""
    example: TrajectoryAddress
    """The newest."""


class FailuresPage(WireReply):
    """Groups of failures, the most frequent first."""

    failures: list[Failure]
    unreadable: list[str]
    """Files that could not be read."""
    files: int
    """Files of the run."""
    files_left: int
    """Files that were not read yet: ask again, which goes on there."""


class TaskResult(WireReply):
    """The rollouts of a row in an evaluation."""

    score: float | None
    """Mean score, or null when infrastructure errors ended all."""
    passed: int
    rollouts: int
    """Rollouts that ended."""
    failed: int
    """Rollouts that an infrastructure error ended."""


class EvaluatedTask(WireReply):
    """A row, and its result in each evaluation."""

    sample: str
    prompt: str
    """The beginning of the last user message."""
    results: list[TaskResult | None]
    """Null in an evaluation without the row."""


class EvaluationColumn(WireReply):
    """An evaluation among others of the same rows."""

    key: str
    """Key of its run."""
    evaluation: Evaluation
    difference: Estimate | None
    """Its mean score less the first evaluation's, over the rows that both have."""


class EvaluationsPage(WireReply):
    """Evaluations of the same rows, row by row, the hardest rows first."""

    columns: list[EvaluationColumn]
    """The chosen evaluation, then the newest others."""
    tasks: list[EvaluatedTask]
    total: int
    """Rows of the chosen evaluation."""


class SpanBar(WireReply):
    """A span of a trace."""

    name: str
    service: str
    """Empty for a span that an agent's framework recorded."""
    kind: str
    """`chat`, `execute_tool` or `operation`."""
    about: str
    """Model and tokens of a generation, the tool of a call, unless they are in the name."""
    depth: int
    """Spans above it."""
    start: float
    """Seconds after the trace's start."""
    seconds: float | None
    """None while it is open."""
    error: str
    """Message of its error. Empty for none."""


class SpansPage(WireReply):
    """The spans of a trace, by their start."""

    spans: list[SpanBar]
    total: int
    """Spans of the trace. The list may hold fewer."""


class ReplicaState(WireReply):
    """A replica of a running service."""

    replica: str
    pid: int
    ready: bool
    reason: str
    """Why it is not ready."""
    version: int | None
    """Version of its weights, or None for services without any."""
    latest: int | None
    """The newest published version."""
    verdict: str
    """Verdict of the proof of these weights. Empty without one."""
    trace_backends: list[str]
    spans_ended: int
    spans_waiting: int
    spans_lost: int
    threads: int | None
    code: str
    """Digest of the user's own code. Empty without any."""
    queues: dict[str, float]
    """Requests in flight, running, waiting, and the like, by name."""


class ServiceState(WireReply):
    """A service that the console was started with."""

    service: str
    url: str
    answers: bool
    message: str
    """Why it does not answer."""
    replicas: list[ReplicaState]


class SystemPage(WireReply):
    """The running services."""

    services: list[ServiceState]


class TryOffer(WireReply):
    """Model and tools to try. Empty where the service does not answer."""

    model: str | None
    tools: list[ToolSchema]
    scorers: list[ScorerInfo]


class TryAnswer(WireReply):
    """The answer of a service."""

    text: str
    facts: dict[str, str | float | int | None]


class ConsoleInfo(WireReply):
    """Outputs folder and services of this console."""

    outputs: str
    services: list[str]
    """Names of the services whose addresses it was started with."""
