"""Settings of the agent service: tokenizer, agent loops, concurrency, clients of the other services."""

import sys
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, SecretStr, model_validator

from trackway.clients import CallPolicy
from trackway.serving.user_code import OwnCodeSettings
from trackway.wire.chat import ChatModelSettings
from trackway.wire.sessions import FormatUse, SessionBounds

_OUTAGE_S = 120.0
"""Retries outlast a restart of Ray Serve's proxy or of a service, which takes up to a minute."""


class ContainerSettings(BaseModel):
    """A container in which an external agent runs."""

    model_config = ConfigDict(extra="forbid")

    image: str = Field(min_length=1)
    """Image to run."""
    command: list[str] = Field(default_factory=list)
    """Program and arguments, instead of the image's own."""
    engine: Literal["podman", "docker"] | None = None
    """Program that runs containers. Without it podman, else docker, whichever is on the PATH. Experimental: no
    container has run by docker."""
    network: str = "host"
    """Network, in which the base URL of the agent service must be reachable."""
    options: list[str] = Field(default_factory=list)
    """Further options of the engine's `run`, such as `--memory=1g` or `--volume=/data:/data:ro`."""


class ExternalSettings(BaseModel):
    """The program, container, function or URL that `agent_name: external` runs for each rollout."""

    model_config = ConfigDict(extra="forbid")

    command: list[str] = Field(default_factory=list)
    """Program and arguments. It calls the model at OPENAI_BASE_URL with OPENAI_API_KEY and reads the row from its
    standard input."""
    container: ContainerSettings | None = None
    """Instead of a command: a container, which is given what a command is; Linux only."""
    function: str | None = Field(default=None, pattern=r"^[\w.]+:\w+$")
    """Instead of a command: `module:name` of a function of the session's access and the row. It may return a score."""
    url: str | None = Field(default=None, pattern=r"^https?://")
    """Instead of a command: a URL that gets an ExternalRollout by POST and answers with an ExternalReply at the end."""
    headers: dict[str, SecretStr] = Field(default_factory=dict[str, SecretStr])
    """Headers of the requests to the URL, such as `authorization`."""
    folder: Path | None = None
    """Working folder of the command."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Further variables of the program."""
    variables: list[str] = Field(default_factory=list)
    """Names of the service's own variables that the program gets, in addition to PATH, HOME, locale, proxies,
    certificates and such."""
    hides_processes: bool = True
    """True if a command sees its own processes only, in a PID namespace, where the host allows it (else a warning says
    so). An ordinary user's then has a user namespace too, in which setuid programs have no effect."""
    bounds: SessionBounds = Field(default_factory=SessionBounds)
    """Bounds of each rollout's session."""
    formats: FormatUse = "guide"
    """Use of `response_format`, `text.format` and `output_config.format` of its calls: `guide` has the engine
    guide the answer, whose tokens are then not trained. `note` names them in the session's `ignored_fields`, and trains
    what the model writes by itself."""
    max_running: int = Field(default=64, ge=1)
    """Rollouts of it at once on this replica; others wait."""
    max_output_bytes: int = Field(default=65_536, ge=1)
    """Bytes of its output that the trajectory keeps, from the end."""

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        kinds = [bool(self.command), *(kind is not None for kind in (self.container, self.function, self.url))]
        if kinds.count(True) != 1:
            raise ValueError("external: expected one of command, container, function and url")
        if self.container is not None and sys.platform != "linux":
            raise ValueError(f"external.container: expected Linux, got {sys.platform}; run the engine in a command")
        return self

    @property
    def is_on_this_host(self) -> bool:
        """Return whether it reaches the addresses of this host: all but a URL, and a container in a network of its
        own."""
        return self.url is None and (self.container is None or self.container.network == "host")


class EnvironmentSettings(BaseModel):
    """An environment of another project, for `agent_name: environment:NAME`."""

    model_config = ConfigDict(extra="forbid")

    protocol: Literal["openenv", "nemo_gym"]
    """Protocol of the server: OpenEnv's `/ws`, or the routes of a NeMo-Gym resources server."""
    url: str = Field(pattern=r"^https?://")
    """Base URL of the server, which each agent replica must reach."""
    headers: dict[str, SecretStr] = Field(default_factory=dict[str, SecretStr])
    """Headers of the requests to it, such as `authorization`."""
    scored_by: Literal["environment", "reward"] = "environment"
    """Source of the trajectory's score: the environment, or the reward service, which sees the rewards of steps as
    those of tools."""
    observation_field: str | None = None
    """Field of an observation that the model reads. Without it all fields as JSON, or the only one as it is."""
    max_open: int = Field(default=64, ge=1)
    """Episodes at once on this replica; others wait."""
    open_timeout_s: float = Field(default=120.0, gt=0)
    """Longest time until an episode has begun, in seconds. A server that is full or starting is asked again."""
    call_timeout_s: float = Field(default=60.0, gt=0)
    """Time limit of one call and of the reward, in seconds. A slower one ends the trajectory with an error."""
    max_reply_bytes: int = Field(default=1_048_576, ge=1024)
    """Bytes of one answer. A longer one ends the trajectory with an error."""


HttpUrlText = Annotated[str, Field(pattern=r"^https?://[^@]+$")]
AgentName = Annotated[str, Field(pattern=r"^[\w.-]{1,64}$")]


class AgentSettings(OwnCodeSettings):
    """Settings of an agent replica, in addition to the URLs of the other services."""

    model_path: str
    """Folder or Hugging Face id of the tokenizer. It must belong to the rollout service's model."""
    chat_template_kwargs: dict[str, JsonValue] = Field(default_factory=dict)
    """Variables of the chat template, e.g. `{"enable_thinking": false}`; verl's `data.apply_chat_template_kwargs`."""
    tool_parser: str | None = None
    """Format of tool calls in the model's text: `hermes`, `qwen3_coder`, `llama3_json`, `mistral`, `pythonic`, or the
    name given to `register_tool_format`. By default the one that the model's chat template writes, else `hermes`."""
    agent_loop_config_path: Path | None = None
    """verl's YAML list of own agent loops, each with `name`, `_target_` and arguments of its class."""
    max_concurrent_trajectories: int = Field(default=1024, ge=1)
    """Concurrent trajectories on this replica. Others wait, and their time limit starts when they run."""
    min_concurrent_trajectories: int | None = Field(default=None, ge=1)
    """Fewest concurrent trajectories on this replica, if their number follows the rollout engines' KV caches, at most
    `max_concurrent_trajectories`. Without it the latter alone holds."""
    release_timeout_s: float = Field(default=5.0, gt=0)
    """Time limit for releasing a trajectory's tool instances; the tool server expires the rest."""
    max_sessions: int = Field(default=1024, ge=1)
    """Open sessions of this replica that callers opened, which take no slot of rollouts. For one more the session that
    has been idle for longest ends, or 429 is the answer. As many ended ones are kept."""
    max_sessions_per_token: int = Field(default=512, ge=1)
    """Open sessions that were opened with one token. Without tokens `max_sessions` alone holds."""
    session_room_s: float = Field(default=300.0, ge=0)
    """Seconds without a request after which an open session may end to make room for another."""
    external: ExternalSettings | None = None
    """The agent of `agent_name: external`, which calls the model through a session. Its `bounds`, `max_running` and
    `max_output_bytes` limit it."""
    external_agents: dict[AgentName, ExternalSettings] = Field(default_factory=dict[str, ExternalSettings])
    """Further ones by name, each for `agent_name: external:NAME`."""
    environments: dict[AgentName, EnvironmentSettings] = Field(default_factory=dict[str, EnvironmentSettings])
    """Environments of other projects by name, each for `agent_name: environment:NAME`."""
    chat_model: ChatModelSettings | None = None
    """Instead of the rollout service: a model that speaks messages, for evaluations by `single_turn_agent`,
    `tool_agent` and environments."""
    teachers: dict[AgentName, HttpUrlText] = Field(default_factory=dict[str, str])
    """URLs of further rollout services by name, whose models teach runs with `distillation.enabled`."""
    rollout_routing: Literal["trajectory", "group"] = "trajectory"
    """Replica of a generation. `trajectory`: where its group's prompt is, in even numbers, and where its earlier turns
    were. `group`: by a hash of the group, which keeps its trajectories together however full the replica is. Calls
    through Ray Serve's proxy always go by group."""
    rollout_policy: CallPolicy = CallPolicy(
        read_s=600.0, total_s=1800.0, attempts=8, outage_s=_OUTAGE_S, max_in_flight=512
    )
    """Client policy of generation. Retries outlast a weight update, which takes seconds."""
    tools_policy: CallPolicy = CallPolicy(outage_s=_OUTAGE_S)
    """Client policy of tool calls."""
    reward_policy: CallPolicy = CallPolicy(outage_s=_OUTAGE_S)
    """Client policy of scoring."""
    trainer_policy: CallPolicy = CallPolicy(outage_s=_OUTAGE_S)
    """Client policy of handing sessions to the run that trains on them."""

    @model_validator(mode="after")
    def _bounds_in_order(self) -> Self:
        least, most = self.min_concurrent_trajectories, self.max_concurrent_trajectories
        if least is not None and self.chat_model is not None:
            raise ValueError(
                f"min_concurrent_trajectories: expected None with chat_model, whose KV cache is unknown, got {least}; "
                "set max_concurrent_trajectories alone"
            )
        if least is not None and least > most:
            raise ValueError(
                f"min_concurrent_trajectories: expected at most max_concurrent_trajectories ({most}), got {least}; "
                "lower it, or raise the other"
            )
        return self

    @property
    def own_files(self) -> list[Path]:
        """Files of own code that the settings name."""
        return [self.agent_loop_config_path] if self.agent_loop_config_path else []
