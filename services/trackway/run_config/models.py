"""The root of a run's configuration, and all sections except the policy model's.

Key names and defaults are verl's (`verl/trainer/config/ppo_trainer.yaml`) unless the field says otherwise. Trackway's
own keys are under `trackway.*`.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, JsonValue, SecretStr, field_validator, model_validator

from trackway.run_config.algorithm import AlgorithmConfig
from trackway.run_config.asynchronous import AsyncTrainingConfig, RolloutSectionConfig, V1Config
from trackway.run_config.distillation import DistillationConfig
from trackway.run_config.placement import Placement
from trackway.run_config.policy import ActorRolloutRefConfig, CriticConfig
from trackway.run_config.rollout_correction import RolloutCorrectionConfig
from trackway.run_config.section import Section, Seed, null_is_the_default
from trackway.run_config.unsupported_keys import LOGGERS, OTHER_LOGGERS, UnsupportedError, UnsupportedKey
from trackway.tracing import TracingSettings
from trackway.tracing.export.backends import full_project
from trackway.wire.base import Label, RunName
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.trajectory import TraceBackend
from trackway.wire.weights import TransportName


class DataConfig(Section):
    """The rows for training and validation, and their length limits."""

    train_files: list[str] = Field(default_factory=list)
    """Parquet or JSONL files of rows in verl's schema. A single path is accepted too."""
    val_files: list[str] = Field(default_factory=list)
    """Files of held-out rows. Without files there is no validation."""
    prompt_key: str = "prompt"
    """Column of the prompt in these files."""
    reward_fn_key: str = "data_source"
    """Column of the name by which a row's scorer is found."""
    train_batch_size: int = Field(default=1024, ge=1)
    """Prompts per step, each with `rollout.n` rollouts."""
    gen_batch_size: int | None = Field(default=None, ge=1)
    """Prompts that are requested at once with `algorithm.filter_groups`, as in verl's DAPO: more than
    `train_batch_size` samples on stock, and what a step of a synchronous run does not need is discarded. Null requests
    one prompt for each group that is left out. No effect without the filter, and none in verl 0.9.1."""
    val_batch_size: int | None = Field(default=None, ge=1)
    """Most validation prompts that are requested concurrently. Null takes `trackway.max_inflight_groups`."""
    train_max_samples: int = Field(default=-1, ge=-1)
    """Train on so many rows, as `trackway.max_samples` chooses them. 0 and -1 take all."""
    val_max_samples: int = Field(default=-1, ge=-1)
    """Validate on so many rows, chosen in the same way."""
    max_prompt_length: int = Field(default=512, ge=1)
    """Most tokens of a templated prompt. A longer prompt is filtered out, or handled according to `truncation`."""
    max_response_length: int = Field(default=512, ge=1)
    """Most tokens of the whole multi-turn response, including observations."""
    filter_overlong_prompts: bool = False
    """Drop rows whose templated prompt, including tool schemas, exceeds `max_prompt_length`. It is measured with
    `apply_chat_template_kwargs`: leave room if the agent service has other `chat_template_kwargs`."""
    truncation: Literal["left", "right", "middle", "error"] = "error"
    """Treatment of an overlong prompt: cut its first, last or middle tokens (incident `prompt_cut`), or fail its
    trajectory. In supervised training of an overlong row: `middle` is not possible, and `error` fails the run before
    its first step."""
    shuffle: bool = True
    """Draw a new order of the rows for each epoch, and the rows of `train_max_samples` and `val_max_samples`."""
    apply_chat_template_kwargs: dict[str, JsonValue] = Field(default_factory=dict[str, JsonValue])
    """Variables of the chat template, such as `enable_thinking`, for the agent service."""
    drop_last: bool = True
    """Skip the incomplete batch at the end of each epoch, as verl does; false trains on it too."""
    seed: Seed | None = None
    """Seed of the row order and of the choice of rows. None takes `trackway.seed`."""
    messages_key: str = "messages"
    """Supervised training: column of the conversation, in OpenAI's chat format. The assistant's messages are
    trained."""
    tools_key: str = "tools"
    """Supervised training: column of the tools offered in the conversation, in OpenAI's format. It may be missing."""
    enable_thinking_key: str = "enable_thinking"
    """Supervised training: column of the chat template's variable `enable_thinking`. It may be missing."""
    enable_thinking_default: bool | None = None
    """The variable's value for rows without that column. Null leaves it to the template."""
    max_length: int = Field(default=1024, ge=2)
    """Supervised training: most tokens of a row. A longer row is an error, or cut on the side of `truncation`."""

    @field_validator("enable_thinking_default", mode="before")
    @classmethod
    def _none_is_null(cls, value: object) -> object:
        return None if value == "none" else value  # as verl's own file has it

    @property
    def columns(self) -> dict[str, str]:
        """Columns of the rows' schema that have another name in the files."""
        names = {"prompt": self.prompt_key, "data_source": self.reward_fn_key}
        return {name: column for name, column in names.items() if column != name}

    @field_validator("train_files", "val_files", mode="before")
    @classmethod
    def _one_path_is_a_list(cls, value: object) -> object:
        if value is None:
            return []
        return [value] if isinstance(value, str) else value


class CustomRewardFunctionConfig(Section):
    """A scoring function of the user's."""

    path: str | None = None
    """Python file with the function that scores every row. null leaves scorers to the deployment."""
    name: str = "compute_score"
    """The function: `compute_score(data_source, solution_str, ground_truth, extra_info, **reward_kwargs)`, sync or
    async, which returns a number or a dict with the number `score`."""
    reward_kwargs: dict[str, JsonValue] = Field(default_factory=dict)
    """Keyword arguments passed to the function in addition."""

    _null_is_the_default = field_validator("name", "reward_kwargs", mode="before")(null_is_the_default)


class OverlongBufferConfig(Section):
    """DAPO's penalty on long responses (arXiv:2503.14476, section 3.4)."""

    enable: bool = False
    """Lower the score of a response that ends in the last `len` tokens before `max_resp_len`. The accuracy of a
    validation stays as scored. verl's older recipes write `reward_model.overlong_buffer`."""
    len: int = Field(default=0, ge=0)
    """Tokens over which the penalty rises."""
    penalty_factor: float = Field(default=0.0, ge=0)
    """The penalty of a response of `max_resp_len` tokens."""
    log: bool = False
    """Record the penalty as the reward's component `overlong_reward`, and as `critic/overlong_reward`."""

    _null_is_the_default = field_validator("*", mode="before")(null_is_the_default)


class RewardKwargsConfig(Section):
    """Arguments of verl's reward managers."""

    overlong_buffer_cfg: OverlongBufferConfig = Field(default_factory=OverlongBufferConfig)
    max_resp_len: int | None = Field(default=None, ge=1)
    """Length in tokens that `overlong_buffer_cfg` ends at. Null takes `data.max_response_length`."""


class RewardManagerConfig(Section):
    """verl's way from responses to calls of the scoring function."""

    name: Literal["naive", "dapo", "batch", "prime", "gdpo", "rate_limited", "remote"] | None = None
    """The reward service scores each response by itself and several concurrently, whatever the name. What would score
    otherwise in verl is refused: `batch` without `trackway.scores_are_independent`, and `overlong_buffer_cfg` with a
    name other than `dapo`, which alone has it in verl."""


class RewardModelEngineConfig(Section):
    """The engine of the reward model, for the deployment. null leaves the choice to it."""

    name: Literal["vllm", "sglang", "hf", "torch"] | None = None
    """A vLLM or SGLang server, or the embedded torch engine (also `hf`)."""
    tensor_model_parallel_size: int | None = Field(default=None, ge=1)
    """GPUs per replica, separate from the rollout engines' GPUs. null is one. There is one replica."""
    gpu_memory_utilization: float | None = Field(default=None, gt=0, le=1)
    """Share of a GPU's memory for the engine's weights and KV cache."""
    enforce_eager: bool | None = None
    """Run the engine without CUDA graphs."""
    enable_prefix_caching: bool | None = None
    """Reuse the KV cache of common prompt prefixes."""
    dtype: Literal["float32", "bfloat16", "auto"] | None = None
    """Data type of the engine."""
    max_num_seqs: int | None = Field(default=None, ge=1)
    """Most concurrent requests."""
    max_model_len: int | None = Field(default=None, ge=2)
    """Most tokens of question and answer together, or of a classifier's conversation. A longer one is an
    error. Null is `prompt_length` + `response_length` if both are given."""
    prompt_length: int | None = Field(default=None, ge=1)
    """Most tokens of a question."""
    response_length: int | None = Field(default=None, ge=1)
    """Most tokens of an answer."""


class RewardModelConfig(Section):
    """A model that scores, or that `custom_reward_function` asks. The run's services serve it with the policy."""

    enable: bool = False
    """Serve `model_path` as the service `reward_model`. Without `custom_reward_function.path` it must be a classifier,
    and its logit for the conversation, rendered by its own chat template, is the score. A function gets its address as
    `reward_router_address`, to which it adds `/v1/chat/completions`, or `/classify` of a classifier, and its tokenizer
    as `reward_model_tokenizer`."""
    model_path: str | None = None
    """Folder or Hub id of the model, and its name in requests. A classifier with one label is one whose `config.json`
    has an architecture `*ForSequenceClassification`. Any other model is generative."""
    rollout: RewardModelEngineConfig = Field(default_factory=RewardModelEngineConfig)

    @property
    def max_model_len(self) -> int | None:
        """Most tokens of question and answer together."""
        asked, answered = self.rollout.prompt_length, self.rollout.response_length
        return self.rollout.max_model_len or (asked + answered if asked and answered else None)


class RewardConfig(Section):
    """Use of scores by the trainer."""

    reward_manager: RewardManagerConfig = Field(default_factory=RewardManagerConfig)
    reward_kwargs: RewardKwargsConfig = Field(default_factory=RewardKwargsConfig)
    reward_model: RewardModelConfig = Field(default_factory=RewardModelConfig)


class GlobalProfilerConfig(Section):
    """PyTorch's profiler around the updates of some steps."""

    tool: Literal["torch"] | None = None
    """`torch` writes a trace of CPU and GPU for Perfetto or chrome://tracing. verl's other tools attach to a process:
    start the worker under them."""
    steps: list[int] | None = None
    """Steps that are profiled; null profiles none."""
    save_path: str | None = None
    """Folder of the traces, `step_<n>.json.gz`. Null takes `outputs/<run>/profile`."""


Frequency = Annotated[int, Field(ge=-1)] | Literal["after_each_epoch"]


def steps_between(frequency: Frequency, per_epoch: int) -> int:
    """Steps between two events of this frequency, in a run of `per_epoch` steps for each epoch."""
    return frequency if isinstance(frequency, int) else per_epoch


class TrainerConfig(Section):
    """Length of the training, frequency of validation and checkpoints, and the run's name."""

    project_name: Label = "trackway"
    """MLflow experiment and W&B project of the run, and of its traces unless `rollout.trace.project_name` is set."""
    experiment_name: RunName = "run"
    """The run's name: its folder, its MLflow and W&B run, and the first part of every trajectory id."""
    logger: list[str] = Field(default_factory=lambda: ["console"])
    """Loggers: `console` prints a line per step; `wandb` and `tensorboard` record metrics there. `file` (metrics.jsonl)
    is always written. `mlflow` is on whenever its URI is set, and listing it requires a URI.
    Experimental: nothing has been sent to W&B's own servers."""
    total_epochs: int = Field(default=30, ge=1)
    """Passes over the rows."""
    total_training_steps: int | None = Field(default=None, ge=1)
    """Total number of steps; overrides `total_epochs`."""
    save_freq: Frequency = -1
    """Steps between checkpoints, or `after_each_epoch`. -1 saves only when the run stops or ends."""
    test_freq: Frequency = -1
    """Steps between validations, or `after_each_epoch`. -1 validates only at the end."""
    val_before_train: bool = True
    """Validate once before the first step."""
    val_only: bool = False
    """Validate once without training."""
    critic_warmup: int = Field(default=0, ge=0)
    """First step that updates the policy; the steps before it train the value model alone."""
    max_actor_ckpt_to_keep: int | None = Field(default=None, ge=1)
    """Number of newest checkpoints to keep. None keeps all."""
    resume_mode: Literal["auto", "disable", "resume_path"] = "auto"
    """`auto` resumes from the run folder's newest checkpoint. `disable` starts from the model. `resume_path` starts
    from `resume_from_path`."""
    resume_from_path: str | None = None
    """A checkpoint, `.../global_step_<n>`, of this or another run; a path, or a URL that fsspec opens."""
    log_val_generations: int = Field(default=0, ge=0)
    """Samples of each validation that are traced, with prompt, response and score: the larger of this and
    `trackway.trace_validation_samples`. verl logs them as a table."""
    default_local_dir: str | None = None
    """Folder of the checkpoints, to which the run's own folder links. null keeps them there. It must not have another
    run's."""
    default_hdfs_dir: str | None = None
    """URL that fsspec opens, such as `s3://bucket/checkpoints`, to which each checkpoint is copied once it is saved, as
    `<url>/<run>/global_step_<n>`. `resume_from_path` takes such a copy. Storage that refuses it is waited for
    (`trackway.storage_wait_s`)."""
    rollout_data_dir: str | None = None
    """Folder for the samples of each step as `<step>.jsonl` with verl's fields: input, output, gts, score, step and the
    components of the reward. `outputs/<run>/trajectories` has every trajectory in any case."""
    validation_data_dir: str | None = None
    """The same for the samples of each validation."""
    use_v1: bool = True
    """False leaves `trainer.v1` unread, as verl's older trainer does."""
    v1: V1Config = Field(default_factory=V1Config)
    n_gpus_per_node: int | None = Field(default=None, ge=0)
    """GPUs per machine, for rollout replicas, and with `nnodes` above 1 for the learner. null leaves it to the
    deployment. A run that starts its services then takes all GPUs if `rollout.name` or
    `rollout.tensor_model_parallel_size` is given."""
    nnodes: int | None = Field(default=None, ge=1)
    """Machines of the learner: the trainer's own, and Ray nodes that offer the resource `trackway_learner`. They share
    the outputs folder and the weights' store. Null is one."""

    @field_validator("default_local_dir", "rollout_data_dir", "validation_data_dir")
    @classmethod
    def _is_a_folder(cls, folder: str | None) -> str | None:
        if folder is not None and "://" in folder:
            raise ValueError(
                f"expected a folder, got the URL {folder}; give a folder on a volume that the run can write"
            )
        return folder

    @field_validator("logger", mode="before")
    @classmethod
    def _one_logger_is_a_list(cls, value: object) -> object:
        return [value] if isinstance(value, str) else value

    @field_validator("logger")
    @classmethod
    def _loggers_are_known(cls, names: list[str]) -> list[str]:
        unknown = [name for name in names if name not in (*LOGGERS, *OTHER_LOGGERS)]
        if unknown:
            raise ValueError(f"expected loggers from {', '.join(LOGGERS)}, got {', '.join(unknown)}")
        return names


class TrackwayConfig(Section):
    """Trackway's own keys."""

    modules: list[str] | None = None
    """Python modules that the agent, tools and reward services import: their agent loops with `@register`, functions
    with `@function_tool` and scorers with `@scorer` are served. Null leaves it to the deployment."""
    code_path: str | None = None
    """Folder in which `modules` are found. null takes the folder of the YAML file, or only PYTHONPATH without one."""
    functions_file: str | None = None
    """The file of a process that serves functions as tools and as the scorer. `trackway.train` in Python writes it."""
    seed: Seed = 42
    """Seed of the learner, the row order, the choice of traced prompts, and, with its position, of each generation."""
    device: str = Field(default="auto", pattern="^(auto|cpu|cuda(:[0-9]+)?)$")
    """Device of the learner: `cpu`, `cuda` (or a particular GPU, `cuda:1`), or `auto` for a GPU if available.
    Without one, `auto` is an error if `trainer.n_gpus_per_node` or the deployment gave the learner GPUs.
    Experimental: no engine or learner has run on a GPU."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Data type of the learner's computation. `fsdp_config.model_dtype` is the weights' type. `auto` is bfloat16 on
    a GPU, as in verl, and with bfloat16 weights. Float32 on a CPU, since most CPUs are slower with bfloat16."""
    float32_head: bool = False
    """Compute logits in float32 where learner and engine compute in bfloat16: policy, reference, and vLLM or SGLang if
    the run starts them. Bfloat16 rounds logits of 8 to 16 to a multiple of 1/16, differently on both sides."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads of the learner. Null chooses at the run's first start: one for a model below 2 million parameters,
    else all cores, less one for the engine with `async_training`. A resumed run keeps the number."""
    learner_ranks: int | None = Field(default=None, ge=1)
    """Processes of the learner, each with a shard of the weights (FSDP2) and, on GPUs, a GPU of its own, in equal parts
    on `trainer.nnodes` machines. 1 is always on one. Null is one for each GPU, `nnodes` x `n_gpus_per_node`, or one for
    each machine without GPUs. The result does not depend on it, but for rounding, and a checkpoint goes on with any
    number. Experimental: no ranks have run on GPUs."""
    placement_timeout_s: float = Field(default=900.0, gt=0)
    """Time limit in seconds for the Ray nodes of `trainer.nnodes` to be there and free, such as pods that Ray's
    autoscaler makes."""
    rank_timeout_s: float = Field(default=600.0, gt=0)
    """Time limit in seconds for the ranks of the learner to wait for one of them; then the learner is restarted from
    its last checkpoint."""
    rollouts_from: Literal["agent", "sessions", "rows"] = "agent"
    """`agent`: rollouts of the rows. `sessions`: sessions of a deployed agent, opened with `train`, which come by
    themselves. A group is the next `rollout.n` that ended with the same `train.group`. `rows`: supervised training on
    the assistant's messages of the rows, without rollouts, by the keys of verl's SFT trainer."""
    session_max_age_s: float = Field(default=3600.0, gt=0)
    """Seconds that an ended session may wait to be trained, or for the others of its group; then it is dropped as
    stale, as it is when its oldest token is more than `max_staleness` versions behind."""
    max_waiting_sessions: int = Field(default=1024, ge=1)
    """Most ended sessions that wait for the run. Another one is refused until some are trained."""
    max_samples: Literal["random", "first"] = "random"
    """Choice of the rows of `data.train_max_samples` and `data.val_max_samples`. `random`, as in verl: rows drawn by
    `data.seed`, or the first ones with `data.shuffle=false`, before overlong prompts are dropped. `first`: the first
    rows that remain after overlong prompts are dropped, and no row where the number is 0. A run that was begun by a
    version without this key resumes with `first`, which are its rows."""
    scores_are_independent: bool = False
    """The scores of a function for `reward.reward_manager.name=batch` do not depend on the other responses of its
    lists, so that lists of one have the same scores. It is needed for that manager."""
    max_inflight_groups: int = Field(default=64, ge=1)
    """Most prompts whose rollouts are requested concurrently."""
    group_attempts: int = Field(default=12, ge=1)
    """Consecutive attempts without progress after which a group's missing rollouts are recorded as failed."""
    group_timeout_s: float = Field(default=1800.0, gt=0)
    """Time limit in seconds for all rollouts of one prompt, including retries."""
    trajectory_timeout_s: float = Field(default=600.0, gt=0)
    """Time limit in seconds for one trajectory, enforced by the agent."""
    tools: list[str] | None = None
    """Names of the tools offered to the model; None offers every tool of the tool server."""
    max_tool_response_tokens: int | None = Field(default=None, ge=1)
    """Most tokens of one observation, in addition to the limit in characters, `multi_turn.max_tool_response_length`.
    None means no limit."""
    on_bad_call: Literal["observe", "end"] = "observe"
    """Treatment of a tool call that cannot be parsed or names an unknown tool: `observe` returns the error to the model
    and continues, `end` ends the trajectory and scores it as it is."""
    trace_prompts_per_step: int | None = Field(default=None, ge=0)
    """Prompts traced per step, each with its rollouts. None takes `rollout.trace.max_samples_per_step_per_worker`."""
    trace_validation_samples: int = Field(default=4, ge=0)
    """Samples traced in each validation. `trainer.log_val_generations` raises it."""
    trace_bytes_per_day: int | None = Field(default=None, ge=1)
    """Budget for the traces of all runs in an outputs folder, in bytes per day (UTC) before compression. Fewer prompts
    are traced as it is used up. Weave's free plan is 1 GB a month, about 33000000 a day. None means no limit."""
    proximal_logprobs: Literal["recompute", "loglinear"] = "recompute"
    """Old log-probabilities of the loss: `recompute` runs a pass of the weights before the update; `loglinear` saves it
    and estimates them from the sampler's and the trained policy's (AReaL): log p_old = log p_s + a (log p - log p_s)
    with a = (v - v_s) / (v + 1 - v_s), of the versions that sampled the token (v_s) and before the update (v)."""
    max_staleness: int | None = Field(default=None, ge=0)
    """Drop trajectories whose oldest token comes from weights more than this many versions behind those being trained
    (verl's `max_off_policy_threshold`). None keeps all."""
    over_sample_rate: float = Field(default=0.0, ge=0, lt=1)
    """Share of the groups in flight that a step leaves to later ones: with 0.2 a step begins with 1.25 times the
    prompts that it trains, and ends once 80 % are complete. The slowest go on under new weights, and train as soon as
    they are complete, at the latest at `max_staleness`. Without that key the bound is one version more than the
    rollouts are ahead on average, rounded up."""
    staleness_strategy: Literal["wait", "drop"] = "wait"
    """Treatment of a group that is about to be too stale to train: the learner waits for it, or it is dropped (verl's
    `max_off_policy_strategy`)."""
    save_token_values: bool = False
    """Write what each update computed of its tokens to `outputs/<run>/token_values`: the learner's log-probability,
    entropy, advantage, and whether the token was clipped or rejected. The console shows them."""
    mlflow_uri: str | None = None
    """MLflow tracking server. None takes the trainer service's, and MLflow is off if that is unset."""
    feedback: bool = True
    """Record reward, advantage and training status (`fate`) on each trace, in MLflow and in Weave, and a ground truth
    of up to 1,000 characters."""
    feedback_deadline_s: float = Field(default=3600.0, gt=0)
    """Seconds a trace may be missing from a reachable MLflow before its feedback is dropped. Longer than a backlog of
    traces takes."""
    sleep_timeout_s: float = Field(default=600.0, gt=0)
    """Time limit in seconds for engines that share the learner's GPUs to release their memory, and to allocate it again
    and load the new weights."""
    keep_weights: int = Field(default=4, ge=2)
    """Number of published weight versions to keep, so that none is removed while a replica loads it."""
    weights_anchor_every: int | None = Field(default=None, ge=0)
    """One published version of so many is written whole; the others as what changed since the version before, a few
    percent of the bytes in bfloat16, from which each host of replicas assembles a copy (`weights_cache` of the rollout
    service). Changes that are not small, as in float32, are written whole. 0 writes all whole. null does so in a
    folder, which replicas read in place, and takes 8 for an object store."""
    weights_transport: TransportName = "store"
    """How engines get the tensors of a version: `store` reads its files. `ipc` takes them from the learner's memory by
    CUDA IPC, for vLLM on the learner's GPU (`weights_transport` of the rollout service). Versions are in the store in
    either case, and an engine that fails to take one reads it there. `ipc` keeps a copy of what is published on the
    GPU. Experimental: no weights have come by CUDA IPC."""
    storage_wait_s: float = Field(default=600.0, ge=0)
    """Seconds a run waits for a disk that is full or cannot be written before it fails. It can then be resumed."""
    max_restarts: int = Field(default=2, ge=0)
    """Most restarts of a crashed learner from its last checkpoint."""
    wandb_run_id: str | None = Field(default=None, pattern="^[^/:]+$")
    """Id of the W&B run, in the project of the traces, to which Weave traces are linked and which the logger `wandb`
    resumes."""
    ignored_keys: list[str] = Field(default_factory=list)
    """Keys given to the run that have no effect here. Filled in when the configuration is composed."""


class RunConfig(Section):
    """The complete configuration of a run."""

    data: DataConfig = Field(default_factory=DataConfig)
    actor_rollout_ref: ActorRolloutRefConfig = Field(default_factory=ActorRolloutRefConfig)
    critic: CriticConfig = Field(default_factory=CriticConfig)
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    custom_reward_function: CustomRewardFunctionConfig = Field(default_factory=CustomRewardFunctionConfig)
    reward: RewardConfig = Field(default_factory=RewardConfig)
    distillation: DistillationConfig = Field(default_factory=DistillationConfig)
    trainer: TrainerConfig = Field(default_factory=TrainerConfig)
    global_profiler: GlobalProfilerConfig = Field(default_factory=GlobalProfilerConfig)
    async_training: AsyncTrainingConfig = Field(default_factory=AsyncTrainingConfig)
    rollout: RolloutSectionConfig = Field(default_factory=RolloutSectionConfig)
    trackway: TrackwayConfig = Field(default_factory=TrackwayConfig)

    @model_validator(mode="after")
    def _mini_batch_fits(self) -> Self:
        mini = self.actor_rollout_ref.actor.ppo_mini_batch_size
        if mini > self.data.train_batch_size and not self.is_supervised:
            raise ValueError(
                f"actor_rollout_ref.actor.ppo_mini_batch_size: expected at most data.train_batch_size "
                f"({self.data.train_batch_size}), got {mini}; both count prompts"
            )
        return self

    @model_validator(mode="after")
    def _teacher_reads_the_whole_sequence(self) -> Self:
        if self.distillation.enabled and self.trackway.rollouts_from == "sessions":
            raise ValueError("distillation.enabled: expected rollouts of rows, got trackway.rollouts_from=sessions")
        self.distillation.check_length(self.data.max_prompt_length + self.data.max_response_length)
        return self

    @model_validator(mode="after")
    def _critic_fits(self) -> Self:
        estimator, warmup = self.algorithm.adv_estimator, self.trainer.critic_warmup
        if self.critic.is_used(estimator):
            mini = self.critic.ppo_mini_batch_size
            if mini is not None and mini > self.data.train_batch_size:
                raise ValueError(
                    f"critic.ppo_mini_batch_size: expected at most data.train_batch_size "
                    f"({self.data.train_batch_size}), got {mini}; both count prompts"
                )
        elif estimator == "gae":
            raise ValueError("critic.enable: expected true or null with algorithm.adv_estimator=gae, got false")
        elif warmup:
            raise ValueError(
                f"trainer.critic_warmup: expected 0 without a value model, got {warmup}; set "
                "algorithm.adv_estimator=gae or critic.enable=true"
            )
        return self

    @model_validator(mode="after")
    def _buffer_fits_the_response(self) -> Self:
        keys = self.reward.reward_kwargs
        longest, buffer = keys.max_resp_len or self.data.max_response_length, keys.overlong_buffer_cfg
        if buffer.enable and not 0 < buffer.len <= longest:
            raise ValueError(
                f"reward.reward_kwargs.overlong_buffer_cfg.len: expected 1 to {longest} tokens, the longest response "
                f"(max_resp_len, or data.max_response_length), got {buffer.len}"
            )
        return self

    @model_validator(mode="after")
    def _reward_manager_scores_as_in_verl(self) -> Self:
        manager, kwargs = self.reward.reward_manager.name, self.reward.reward_kwargs
        if manager == "batch" and not self.trackway.scores_are_independent:
            raise UnsupportedError(
                UnsupportedKey(
                    key="reward.reward_manager.name",
                    expected="a manager that scores each response by itself",
                    got="batch, whose function may compare the responses of a batch, and which is called with lists of "
                    "one here",
                    remedy="if its scores do not depend on the other responses, set "
                    "trackway.scores_are_independent=true",
                )
            )
        if kwargs.overlong_buffer_cfg.enable and manager not in (None, "dapo"):
            raise ValueError(
                "reward.reward_manager.name: expected dapo with reward.reward_kwargs.overlong_buffer_cfg.enable=true, "
                f"got {manager}, which ignores the buffer in verl; set reward.reward_manager.name=dapo, or enable=false"
            )
        return self

    @model_validator(mode="after")
    def _reward_model_is_named(self) -> Self:
        model = self.reward.reward_model
        if model.enable and not model.model_path:
            raise ValueError("reward.reward_model.model_path: expected a model with enable=true, got none; name it")
        return self

    @model_validator(mode="after")
    def _bound_allows_the_depth(self) -> Self:
        depth, bound = self.async_training.staleness_threshold, self.trackway.max_staleness
        if bound is not None and depth > bound:
            raise ValueError(
                f"async_training.staleness_threshold: expected at most trackway.max_staleness ({bound}), got "
                f"{depth:g}; rollouts that far ahead would be dropped"
            )
        if bound is not None and self.versions_ahead > bound:
            raise ValueError(
                f"trackway.over_sample_rate: expected at most trackway.max_staleness ({bound}) versions ahead, got "
                f"{self.versions_ahead:g} on average; lower the rate, or raise trackway.max_staleness"
            )
        return self

    @model_validator(mode="after")
    def _validations_have_their_weights(self) -> Self:
        every, test_freq = self.async_training.trigger_parameter_sync_step, self.trainer.test_freq
        if isinstance(test_freq, int) and test_freq > 0 and test_freq % every:
            raise ValueError(
                f"trainer.test_freq: expected a multiple of async_training.trigger_parameter_sync_step ({every}), got "
                f"{test_freq}; a validation needs published weights"
            )
        return self

    @model_validator(mode="after")
    def _prompts_leave_room_in_the_engine(self) -> Self:
        longest, prompt = self.actor_rollout_ref.rollout.max_model_len, self.data.max_prompt_length
        if longest is not None and longest <= prompt:
            raise ValueError(
                f"actor_rollout_ref.rollout.max_model_len: expected more than data.max_prompt_length ({prompt}), got "
                f"{longest}; the engine's limit covers prompt and response together"
            )
        return self

    @model_validator(mode="after")
    def _replicas_fit_the_gpus(self) -> Self:
        size, gpus = self.actor_rollout_ref.rollout.tensor_model_parallel_size, self.trainer.n_gpus_per_node
        if size is not None and gpus and size > gpus * (self.trainer.nnodes or 1):
            raise ValueError(
                "actor_rollout_ref.rollout.tensor_model_parallel_size: expected at most the run's "
                f"{gpus * (self.trainer.nnodes or 1)} GPUs (trainer.n_gpus_per_node x trainer.nnodes), got {size}"
            )
        return self

    @model_validator(mode="after")
    def _bypass_has_its_own_loss(self) -> Self:
        mode, is_bypass = (
            self.actor_rollout_ref.actor.policy_loss.loss_mode,
            self.algorithm.rollout_correction.bypass_mode,
        )
        if is_bypass and mode not in ("vanilla", "bypass_mode"):
            raise ValueError(
                "actor_rollout_ref.actor.policy_loss.loss_mode: expected vanilla with algorithm.rollout_correction."
                f"bypass_mode=true, where loss_type is the loss, got {mode}; set bypass_mode=false"
            )
        if mode == "bypass_mode" and not is_bypass:
            raise ValueError(
                "actor_rollout_ref.actor.policy_loss.loss_mode: expected another loss without algorithm."
                "rollout_correction.bypass_mode, got bypass_mode; set algorithm.rollout_correction.bypass_mode=true"
            )
        return self

    @model_validator(mode="after")
    def _pass_at_k_has_a_second_rollout(self) -> Self:
        if self.algorithm.adv_estimator == "grpo_passk" and self.actor_rollout_ref.rollout.n < 2:
            raise ValueError(
                "actor_rollout_ref.rollout.n: expected at least 2 with algorithm.adv_estimator=grpo_passk, which "
                f"compares the best rollout with the second, got {self.actor_rollout_ref.rollout.n}"
            )
        return self

    @model_validator(mode="after")
    def _one_source_of_old_logprobs(self) -> Self:
        if self.trackway.proximal_logprobs == "loglinear" and self.algorithm.rollout_correction.bypass_mode:
            raise ValueError(
                "trackway.proximal_logprobs: expected recompute with algorithm.rollout_correction.bypass_mode=true, "
                "got loglinear; the sampler's logprobs are the old ones there, nothing is left to estimate"
            )
        return self

    @model_validator(mode="after")
    def _each_rank_has_a_device(self) -> Self:
        device, count = self.trackway.device, self.placement.ranks
        if count > 1 and ":" in device:
            raise ValueError(
                f"trackway.device: expected cuda, cpu or auto with trackway.learner_ranks={count}, got {device}; "
                "CUDA_VISIBLE_DEVICES chooses the GPUs"
            )
        return self

    @model_validator(mode="after")
    def _ranks_fit_the_nodes(self) -> Self:
        (ranks, nodes), gpus = self.placement, self.trainer.n_gpus_per_node
        if ranks % nodes:
            raise ValueError(
                f"trackway.learner_ranks: expected a multiple of trainer.nnodes ({nodes}), or 1, got {ranks}; change "
                "one of them"
            )
        if nodes > 1 and gpus and self.trackway.device != "cpu" and ranks > nodes * gpus:
            raise ValueError(
                f"trackway.learner_ranks: expected at most {nodes * gpus} (trainer.nnodes x trainer.n_gpus_per_node), "
                f"got {ranks}; each rank has a GPU"
            )
        return self

    @model_validator(mode="after")
    def _tensors_are_on_one_gpu(self) -> Self:
        model, own = self.actor_rollout_ref.model, self.trackway
        if own.weights_transport == "store":
            return self
        wrong = {
            "trackway.device=cpu": own.device == "cpu",
            f"a learner of {self.placement.ranks} ranks": self.placement.ranks > 1,
            "an adapter alone (model.lora_rank with lora.merge=false)": bool(model.lora_rank and not model.lora.merge),
        }
        if got := [what for what, is_wrong in wrong.items() if is_wrong]:
            raise ValueError(
                f"trackway.weights_transport={own.weights_transport}: expected whole weights of a learner of one "
                f"process on a GPU, got {' and '.join(got)}; set weights_transport=store"
            )
        return self

    @model_validator(mode="after")
    def _bfloat16_weights_compute_in_bfloat16(self) -> Self:
        policy, dtype = self.actor_rollout_ref, self.trackway.dtype
        if not self.has_bfloat16_weights:
            return self
        if dtype == "float32":
            key = "trackway.dtype"
        elif dtype == "auto" and policy.actor.fsdp_config.dtype in ("float32", "fp32"):
            key, dtype = "actor_rollout_ref.actor.fsdp_config.dtype", policy.actor.fsdp_config.dtype
        else:
            return self
        raise ValueError(
            f"{key}: expected bfloat16 with fsdp_config.model_dtype=bf16, got {dtype}; leave one of them out"
        )

    @model_validator(mode="after")
    def _sequences_divide_the_ranks(self) -> Self:
        actor, count = self.actor_rollout_ref.actor, self.placement.ranks
        size = max(actor.ulysses_sequence_parallel_size, actor.fsdp_config.ulysses_sequence_parallel_size)
        if count > 1 and count % size:
            raise ValueError(
                "actor_rollout_ref.actor.ulysses_sequence_parallel_size: expected a divisor of trackway.learner_ranks "
                f"({count}), got {size}"
            )
        if count > 1 and size > 1 and not self.actor_rollout_ref.model.use_remove_padding:
            raise ValueError(
                "actor_rollout_ref.model.use_remove_padding: expected true with "
                f"actor_rollout_ref.actor.ulysses_sequence_parallel_size={size}, got false; it divides packed rows"
            )
        return self

    @model_validator(mode="after")
    def _shards_divide_the_ranks(self) -> Self:
        count = self.placement.ranks
        sections = {"actor_rollout_ref.actor.fsdp_config": self.actor_rollout_ref.actor.fsdp_config}
        for name, section in {**sections, "critic.fsdp": self.critic.fsdp}.items():
            if 0 < section.fsdp_size < count and count % section.fsdp_size:
                raise ValueError(
                    f"{name}.fsdp_size: expected a divisor of trackway.learner_ranks ({count}), or -1, got "
                    f"{section.fsdp_size}"
                )
        return self

    @model_validator(mode="after")
    def _rows_are_cut_at_an_end(self) -> Self:
        if self.is_supervised and self.data.truncation == "middle":
            raise ValueError(
                "data.truncation: expected error, left or right with trackway.rollouts_from=rows, got middle"
            )
        return self

    @model_validator(mode="after")
    def _sessions_replace_rows(self) -> Self:
        if self.trackway.rollouts_from != "sessions":
            return self
        key = "trackway.rollouts_from=sessions"
        if self.data.train_files:
            raise ValueError(f"data.train_files: expected none with {key}, got {len(self.data.train_files)}; remove it")
        if self.trainer.total_training_steps is None and not self.trainer.val_only:
            raise ValueError(
                f"trainer.total_training_steps: expected a number with {key}, got none; sessions do not end"
            )
        if self.algorithm.adv_estimator == "remax":
            raise ValueError(
                f"algorithm.adv_estimator: expected another one with {key}, got remax, which needs a greedy rollout of "
                "the same prompt; take grpo or rloo"
            )
        return self

    @property
    def is_supervised(self) -> bool:
        """Return whether the assistant's messages of the rows are trained, without rollouts."""
        return self.trackway.rollouts_from == "rows"

    @property
    def data_seed(self) -> int:
        """Seed of the row order and of the choice of rows."""
        return self.trackway.seed if self.data.seed is None else self.data.seed

    @property
    def placement(self) -> Placement:
        """The ranks of the learner and the nodes that they are divided over."""
        nodes, ranks = self.trainer.nnodes or 1, self.trackway.learner_ranks
        if ranks is None:
            ranks = nodes * (self.trainer.n_gpus_per_node or 1 if self.learner_needs_gpus else 1)
        return Placement(ranks, nodes if ranks > 1 else 1)

    @property
    def learner_needs_gpus(self) -> bool:
        """Return whether each rank is given a GPU, as far as the keys say: `auto` depends on the trainer's machine."""
        return self.trackway.device == "cuda" or (self.trackway.device == "auto" and bool(self.trainer.n_gpus_per_node))

    @property
    def idle_gpus(self) -> str:
        """Return which GPUs of the keys no rank of the learner has, in words. An empty string where each has a rank."""
        ranks, of_node = self.placement.ranks, self.trainer.n_gpus_per_node or 0
        gpus = of_node * (self.trainer.nnodes or 1)
        if gpus <= ranks or not self.learner_needs_gpus:
            return ""
        return (
            f"{ranks} of {gpus} GPUs train{'s' * (ranks == 1)}; set trackway.learner_ranks={gpus}, unless rollout "
            "engines take the others"
        )

    @property
    def has_bfloat16_weights(self) -> bool:
        """Return whether the weights of a model of the learner are bfloat16."""
        policy = self.actor_rollout_ref
        sections = (policy.actor.fsdp_config, policy.ref.fsdp_config, self.critic.fsdp)
        return any(section.is_bfloat16 for section in sections)

    @property
    def may_be_stale(self) -> bool:
        """Return whether a step may train on rollouts of older weights than those it updates."""
        return self.versions_ahead > 0 or self.async_training.trigger_parameter_sync_step > 1

    @property
    def versions_ahead(self) -> float:
        """Versions that rollouts are ahead of the learner: the depth and the groups that steps leave to later ones."""
        own, rate = self.async_training, self.trackway.over_sample_rate
        return own.staleness_threshold + round(rate / (1 - rate) / own.trigger_parameter_sync_step, 6)

    @property
    def correction(self) -> RolloutCorrectionConfig:
        """The off-policy correction of this run: truncated token weights where data may be stale and none is chosen."""
        return self.algorithm.rollout_correction.where_stale(self.may_be_stale)

    @property
    def group_size(self) -> int:
        """Rollouts that are requested for each prompt: `rollout.n`, and with remax a greedy one."""
        return self.actor_rollout_ref.rollout.n + (self.algorithm.adv_estimator == "remax")

    def total_steps(self, per_epoch: int) -> int:
        """Steps of the whole run; 0 with `val_only`."""
        trainer = self.trainer
        return 0 if trainer.val_only else trainer.total_training_steps or per_epoch * trainer.total_epochs

    @property
    def traced_prompts(self) -> int:
        """Prompts traced per step; with a trace backend and no limit, all of them, as in verl."""
        trace = self.actor_rollout_ref.rollout.trace
        for bound in (self.trackway.trace_prompts_per_step, trace.max_samples_per_step_per_worker):
            if bound is not None:
                return bound
        return self.data.train_batch_size if trace.backend else 0

    @property
    def traced_validation(self) -> int:
        """Samples traced in each validation."""
        return max(self.trackway.trace_validation_samples, self.trainer.log_val_generations)

    @property
    def default_agent(self) -> str:
        """The agent loop of rows without `agent_name`. verl's default has no tools even with multi-turn enabled."""
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


def weave_project(config: RunConfig, key: SecretStr | None = None) -> str | None:
    """`entity/project` of the run's traces in Weave, or None when no entity is known and Weave is not a trace backend.

    The entity may be looked up with the API key (see `full_project`): `key`, or else WANDB_API_KEY.

    Raises:
        TrackwayError: INVALID_REQUEST when Weave is a trace backend and no entity is known.
    """
    project, is_wanted = config.trace_project, TraceBackend.WEAVE in config.actor_rollout_ref.rollout.trace.backend
    full = full_project(project, (key or TracingSettings().weave_api_key) if is_wanted else None)
    if is_wanted and full is None:
        message = (
            f"actor_rollout_ref.rollout.trace.project_name: expected entity/project for Weave, got {project!r}; "
            "add the entity, or set WANDB_ENTITY in the environment of the trainer service"
        )
        raise TrackwayError(ErrorCode.INVALID_REQUEST, message)
    return full
