"""The section `distillation.*`: teachers that score the student's own tokens, and the loss made of their logprobs.

The keys are verl 0.9.1's (verl/workers/config/distillation.py).
"""

from collections.abc import Mapping
from typing import Literal, Self

from pydantic import Field, model_validator

from trackway.run_config.section import Section
from trackway.wire.rollout import MAX_PROMPT_LOGPROBS, MAX_PROMPT_TOP_LOGPROBS


class DistillationLossConfig(Section):
    """The loss that pulls the student towards its teacher."""

    loss_mode: Literal["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "forward_kl_topk"] = "k3"
    """Estimate of the reverse KL from the sampled token's logprobs (`kl` is k1, `mse` is k2, `low_var_kl` is k3), or
    the forward KL over the teacher's `topk` most likely tokens."""
    topk: int = Field(default=32, ge=1, le=MAX_PROMPT_TOP_LOGPROBS)
    """Tokens of `forward_kl_topk` at each position."""
    use_task_rewards: bool = True
    """Train on the rewards too. false trains on the teacher alone, without entropy bonus and KL penalty."""
    distillation_loss_coef: float = Field(default=1.0, ge=0)
    """Weight of the distillation loss beside the task's rewards."""
    loss_max_clamp: float | None = Field(default=None, gt=0)
    """Bound on the size of each token's loss."""
    log_prob_min_clamp: float | None = Field(default=None, lt=0)
    """Smallest logprob of student and teacher in `forward_kl_topk`."""
    use_policy_gradient: bool = False
    """Take the negative loss of each token as its advantage, instead of its gradient."""
    clip_ratio_low: float = Field(default=0.2, ge=0)
    """Lower bound of PPO's clip range there."""
    clip_ratio_high: float = Field(default=0.2, ge=0)
    """Upper bound of PPO's clip range there."""

    @property
    def uses_topk(self) -> bool:
        """True if the loss needs the teacher's most likely tokens."""
        return self.loss_mode == "forward_kl_topk"

    @model_validator(mode="after")
    def _has_a_gradient_towards_the_teacher(self) -> Self:
        if self.loss_mode in ("kl", "k1") and not self.use_policy_gradient:
            raise ValueError(
                f"loss_mode: expected a loss whose gradient depends on the teacher, got {self.loss_mode}; set "
                "use_policy_gradient=true, or take k2 or k3"
            )
        if self.uses_topk and self.use_policy_gradient:
            raise ValueError(
                "use_policy_gradient: expected false with loss_mode=forward_kl_topk, got true, which uses the sampled "
                "token alone; set it to false, or take k1"
            )
        return self


class TeacherConfig(Section):
    """A teacher."""

    key: str | None = None
    """Value of `teacher_key` in the rows that it scores. Needed with several teachers."""
    model_path: str | None = None
    """URL of a rollout service, name of a policy of the run's own one (`base`, `demo:8`), or a folder or Hugging Face
    id of a model with the student's architecture, which is published there as a policy."""

    @model_validator(mode="before")
    @classmethod
    def _without_its_engine(cls, given: Mapping[str, object]) -> dict[str, object]:
        return {key: value for key, value in given.items() if key not in ("inference", "num_replicas")}


class TeachersConfig(Section, extra="allow"):
    """Teachers by name: `+distillation.teacher_models.math.model_path=...`."""

    __pydantic_extra__: dict[str, TeacherConfig] = Field(init=False)  # pyright: ignore[reportIncompatibleVariableOverride]
    teacher_model: TeacherConfig = Field(default_factory=TeacherConfig)
    """The only teacher."""

    @property
    def given(self) -> dict[str, TeacherConfig]:
        """The teachers, by name."""
        single = {"teacher_model": self.teacher_model} if self.teacher_model.model_path else {}
        return single | (self.__pydantic_extra__ or {})

    @model_validator(mode="after")
    def _one_alone_or_others(self) -> Self:
        others = ", ".join(sorted(self.__pydantic_extra__ or {}))
        if others and self.teacher_model.model_path:
            raise ValueError(
                f"expected teacher_model as the only teacher, got {others} too; give it another name, "
                "since verl ignores it then"
            )
        return self


class DistillationConfig(Section):
    """On-policy distillation: teachers score the tokens that the student sampled."""

    enabled: bool = False
    """Train towards teachers."""
    teacher_key: str = "data_source"
    """Field of a row that chooses among several teachers: `data_source`, `agent_name`, `ability`, or a key of
    `extra_info`."""
    teacher_models: TeachersConfig = Field(default_factory=TeachersConfig)
    distillation_loss: DistillationLossConfig = Field(default_factory=DistillationLossConfig)

    @model_validator(mode="after")
    def _has_teachers(self) -> Self:
        if not self.enabled:
            return self
        teachers = self.teacher_models.given
        if not teachers:
            raise ValueError(
                "teacher_models: expected a teacher, got none; set distillation.teacher_models.teacher_model.model_path"
            )
        for name, teacher in teachers.items():
            if not teacher.model_path:
                raise ValueError(f"teacher_models.{name}.model_path: expected a model, a policy or a URL, got none")
            if teacher.key is None and len(teachers) > 1:
                raise ValueError(
                    f"teacher_models.{name}.key: expected the {self.teacher_key} of its rows, got none beside other "
                    "teachers; set it"
                )
        keys = [teacher.key for teacher in teachers.values()]
        if len(set(keys)) < len(keys):
            twice = next(key for key in keys if keys.count(key) > 1)
            raise ValueError(f"teacher_models: expected different keys, got {twice!r} twice; change one")
        return self

    def check_length(self, tokens: int) -> None:
        """Raise ValueError when sequences of so many tokens have more logprobs than a reply may have."""
        most_likely = self.distillation_loss.topk if self.distillation_loss.uses_topk else 1
        if self.enabled and tokens * most_likely > MAX_PROMPT_LOGPROBS:
            raise ValueError(
                f"distillation.distillation_loss.topk: expected at most {MAX_PROMPT_LOGPROBS} logprobs of a sequence, "
                f"got {most_likely} for each of {tokens} tokens (data.max_prompt_length and data.max_response_length); "
                "lower it"
            )
