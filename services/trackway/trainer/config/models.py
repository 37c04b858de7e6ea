"""The root of a run's configuration, and the sections that are not about the policy model.

Key names and defaults are verl's (`verl/trainer/config/ppo_trainer.yaml`) unless the field says otherwise; keys of our
own live under `trackway.*`.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from trackway.trainer.config.policy import ActorRolloutRefConfig
from trackway.trainer.config.section import Section
from trackway.trainer.config.unsupported_keys import LOGGERS, OTHER_LOGGERS
from trackway.wire.names import Label, RunName

Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
"""What engines and torch take: 64 bits with a sign."""


class DataConfig(Section):
    """Which rows are trained and validated on, and how long they may be."""

    train_files: list[str] = Field(default_factory=list)
    """Parquet or JSONL files of rows in verl's schema; a single path is accepted too."""
    val_files: list[str] = Field(default_factory=list)
    """Files of held-out rows; none means no validation."""
    train_batch_size: int = Field(default=1024, ge=1)
    """Prompts per step, each of which gets `rollout.n` rollouts."""
    train_max_samples: int = Field(default=-1, ge=-1)
    """Train on the first rows only; -1 takes all."""
    val_max_samples: int = Field(default=-1, ge=-1)
    """Validate on the first rows only; -1 takes all."""
    max_prompt_length: int = Field(default=512, ge=1)
    """Tokens of a templated prompt; a longer one is filtered out, or handled as `truncation` says."""
    max_response_length: int = Field(default=512, ge=1)
    """Tokens of the whole multi-turn response, observations included."""
    filter_overlong_prompts: bool = False
    """Drop rows whose templated prompt, tool schemas included, exceeds `max_prompt_length`."""
    truncation: Literal["left", "right", "middle", "error"] = "error"
    """What happens to an overlong prompt: its first, last or middle tokens are cut, or its trajectory is an error."""
    shuffle: bool = True
    """Draw a new order of the rows for each epoch."""
    drop_last: bool = True
    """Leave out the incomplete batch at the end of each epoch, as verl does; false trains on it too."""
    seed: Seed | None = None
    """Seed of that order; None takes `trackway.seed`."""

    @field_validator("train_files", "val_files", mode="before")
    @classmethod
    def _one_path_is_a_list(cls, value: object) -> object:
        if value is None:
            return []
        return [value] if isinstance(value, str) else value


class RolloutCorrectionConfig(Section):
    """Where the old log-probabilities of the loss come from."""

    bypass_mode: bool = False
    """Take the sampler's own logprobs as the old ones, and skip the pass that recomputes them."""


class AlgorithmConfig(Section):
    """How rewards become advantages."""

    adv_estimator: Literal["grpo"] = "grpo"
    """Group-relative advantages; verl's default is gae, which needs a critic that Trackway does not have."""
    norm_adv_by_std_in_grpo: bool = True
    """Divide by the group's standard deviation; false is Dr.GRPO."""
    use_kl_in_reward: Literal[False] = False
    """A KL penalty in the reward is not implemented; `actor.use_kl_loss` puts it in the loss."""
    rollout_correction: RolloutCorrectionConfig = Field(default_factory=RolloutCorrectionConfig)


class TrainerConfig(Section):
    """How long to train, when to validate and save, and what the run is called."""

    project_name: Label = "trackway"
    """MLflow experiment and W&B project of the run, and of its traces unless `rollout.trace.project_name` is set."""
    experiment_name: RunName = "run"
    """The run's name: its folder, its MLflow and W&B run, and the first part of every trajectory id."""
    logger: list[str] = Field(default_factory=lambda: ["console"])
    """Loggers: `console` prints a line per step; `wandb` and `tensorboard` record to these; `file` (metrics.jsonl) is
    always written; `mlflow` is on whenever its URI is set, and naming it requires one."""
    total_epochs: int = Field(default=30, ge=1)
    """Passes over the rows."""
    total_training_steps: int | None = Field(default=None, ge=1)
    """Steps in all, which overrides `total_epochs`."""
    save_freq: int = Field(default=-1, ge=-1)
    """Steps between checkpoints; -1 saves only when the run stops or ends."""
    test_freq: int = Field(default=-1, ge=-1)
    """Steps between validations; -1 validates only at the end."""
    val_before_train: bool = True
    """Validate once before the first step."""
    val_only: bool = False
    """Validate once and end."""
    max_actor_ckpt_to_keep: int | None = Field(default=None, ge=1)
    """Newest checkpoints to keep; None keeps all."""
    resume_mode: Literal["auto", "disable", "resume_path"] = "auto"
    """`auto` resumes from the run folder's newest checkpoint; `disable` starts from the model; `resume_path` starts
    from `resume_from_path`."""
    resume_from_path: str | None = None
    """A checkpoint, `.../global_step_<n>`, of this or another run."""
    n_gpus_per_node: int | None = Field(default=None, ge=0)
    """GPUs of each machine, of which rollout replicas are made; null leaves it to the deployment."""
    nnodes: int | None = Field(default=None, ge=1)
    """Machines; null leaves it to the deployment."""

    @field_validator("logger", mode="before")
    @classmethod
    def _one_logger_is_a_list(cls, value: object) -> object:
        return [value] if isinstance(value, str) else value

    @field_validator("logger")
    @classmethod
    def _loggers_are_known(cls, names: list[str]) -> list[str]:
        unknown = [name for name in names if name not in (*LOGGERS, *OTHER_LOGGERS)]
        if unknown:
            raise ValueError(f"expected loggers out of {', '.join(LOGGERS)}, got {', '.join(unknown)}")
        return names


class TrackwayConfig(Section):
    """Keys of our own."""

    seed: Seed = 42
    """Seed of the learner, the row order, the choice of traced prompts, and of every generation (with its place)."""
    device: str = Field(default="auto", pattern="^(auto|cpu|cuda(:[0-9]+)?)$")
    """Where the learner computes: `cpu`, `cuda` (or one of them, `cuda:1`), or `auto` for a GPU when there is one."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Arithmetic of the learner, whose weights stay float32; `auto` is bfloat16 on a GPU, as in verl, and float32 on a
    CPU, most of which are slower with bfloat16."""
    threads: int = Field(default=1, ge=1)
    """CPU threads of the learner; more than the idle cores makes it slower, not faster."""
    max_inflight_groups: int = Field(default=64, ge=1)
    """Prompts whose rollouts are requested at the same time."""
    group_attempts: int = Field(default=12, ge=1)
    """Attempts in a row that bring none of a group's missing rollouts before these are recorded as failed."""
    group_timeout_s: float = Field(default=1800.0, gt=0)
    """Seconds that all rollouts of one prompt may take, attempts included."""
    trajectory_timeout_s: float = Field(default=600.0, gt=0)
    """Seconds that one trajectory may take before the agent ends it."""
    tools: list[str] | None = None
    """Names of the tools offered to the model; None offers every tool of the tool server."""
    max_tool_response_tokens: int | None = Field(default=None, ge=1)
    """Tokens of one observation that are kept, beside the bound in characters, `multi_turn.max_tool_response_length`;
    None is no bound."""
    on_bad_call: Literal["observe", "end"] = "observe"
    """What a tool call that cannot be parsed or names no offered tool does: `observe` tells the model and continues,
    `end` ends the trajectory and scores it as it is."""
    trace_prompts_per_step: int | None = Field(default=None, ge=0)
    """Prompts per step whose rollouts are all traced; None takes `rollout.trace.max_samples_per_step_per_worker`."""
    trace_validation_samples: int = Field(default=4, ge=0)
    """Samples of each validation that are traced."""
    trace_bytes_per_day: int | None = Field(default=None, ge=1)
    """Bytes of traces that the runs of one outputs folder may send in a day (UTC), before compression; fewer prompts
    are traced as it is used up. Weave's free plan is 1 GB a month, about 33000000 a day. None is no bound."""
    max_staleness: int | None = Field(default=None, ge=0)
    """Trajectories whose oldest token comes from weights more than this many versions behind those being trained are
    dropped (verl's `max_off_policy_threshold`); None keeps all."""
    mlflow_uri: str | None = None
    """MLflow tracking server; None takes that of the trainer service, and without one MLflow is off."""
    feedback: bool = True
    """Record reward, advantage and fate on each trace, in MLflow and in Weave."""
    feedback_deadline_s: float = Field(default=120.0, gt=0)
    """Seconds that a trace may be missing from a reachable MLflow before its feedback is dropped."""
    sleep_timeout_s: float = Field(default=600.0, gt=0)
    """Seconds that engines which share the learner's GPUs may take to release their memory, and to allocate it again
    and load the new weights."""
    keep_weights: int = Field(default=4, ge=2)
    """Published weight versions to keep, so that none is removed while a replica loads it."""
    storage_wait_s: float = Field(default=600.0, ge=0)
    """Seconds that a run waits for a disk that is full or cannot be written, before it fails and can be resumed."""
    max_restarts: int = Field(default=2, ge=0)
    """How often a learner that died is restarted from its last checkpoint."""
    wandb_run_id: str | None = Field(default=None, pattern="^[^/:]+$")
    """Id of the W&B run that Weave traces are linked to, in the project of the traces, and that the logger `wandb`
    resumes."""
    ignored_keys: list[str] = Field(default_factory=list)
    """Keys given to the run that have no effect here; filled in when the configuration is composed."""


class RunConfig(Section):
    """Everything that a run is told."""

    data: DataConfig = Field(default_factory=DataConfig)
    actor_rollout_ref: ActorRolloutRefConfig = Field(default_factory=ActorRolloutRefConfig)
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    trainer: TrainerConfig = Field(default_factory=TrainerConfig)
    trackway: TrackwayConfig = Field(default_factory=TrackwayConfig)

    @model_validator(mode="after")
    def _mini_batch_fits(self) -> Self:
        mini = self.actor_rollout_ref.actor.ppo_mini_batch_size
        if mini > self.data.train_batch_size:
            raise ValueError(
                f"actor_rollout_ref.actor.ppo_mini_batch_size: expected at most data.train_batch_size "
                f"({self.data.train_batch_size}), got {mini}; both count prompts"
            )
        return self

    @model_validator(mode="after")
    def _prompts_leave_room_in_the_engine(self) -> Self:
        longest, prompt = self.actor_rollout_ref.rollout.max_model_len, self.data.max_prompt_length
        if longest is not None and longest <= prompt:
            raise ValueError(
                f"actor_rollout_ref.rollout.max_model_len: expected more than data.max_prompt_length ({prompt}), got "
                f"{longest}; an engine takes prompt and response together"
            )
        return self

    @model_validator(mode="after")
    def _replicas_fit_the_gpus(self) -> Self:
        each, gpus = self.actor_rollout_ref.rollout.tensor_model_parallel_size, self.trainer.n_gpus_per_node
        if each is not None and gpus and each > gpus * (self.trainer.nnodes or 1):
            raise ValueError(
                "actor_rollout_ref.rollout.tensor_model_parallel_size: expected at most the run's "
                f"{gpus * (self.trainer.nnodes or 1)} GPUs (trainer.n_gpus_per_node x trainer.nnodes), got {each}"
            )
        return self

    def total_steps(self, per_epoch: int) -> int:
        """Steps of the whole run; `val_only` is a run of none."""
        trainer = self.trainer
        return 0 if trainer.val_only else trainer.total_training_steps or per_epoch * trainer.total_epochs

    @property
    def traced_prompts(self) -> int:
        """Prompts per step to trace; with a trace backend and no bound, all of them, as in verl."""
        trace = self.actor_rollout_ref.rollout.trace
        for bound in (self.trackway.trace_prompts_per_step, trace.max_samples_per_step_per_worker):
            if bound is not None:
                return bound
        return self.data.train_batch_size if trace.backend else 0

    @property
    def default_agent(self) -> str:
        """The agent loop of rows without `agent_name`; verl's default runs them without tools even in multi-turn."""
        rollout = self.actor_rollout_ref.rollout
        return "tool_agent" if rollout.multi_turn.enable else rollout.agent.default_agent_loop

    @property
    def trace_project(self) -> str:
        """MLflow experiment or Weave project of the traces."""
        return self.actor_rollout_ref.rollout.trace.project_name or self.trainer.project_name

    @property
    def trace_experiment(self) -> str:
        """The tag `experiment_name` of the traces."""
        return self.actor_rollout_ref.rollout.trace.experiment_name or self.trainer.experiment_name
