"""TRL's `GRPOTrainer` with `tools=`, one process: a contender of `step.py`, run by the environment that it makes."""

# pyright: reportMissingImports=false
# (the development environment has no TRL)

import sys
from typing import Any

import torch
import transformers
from datasets import Dataset
from step_work import WARM_UP, Events, Work, calculate, own_cpu, score
from transformers import AutoTokenizer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen3_template


def calculator(expression: str) -> str:
    """
    Compute an arithmetic expression.

    Args:
        expression: The expression.
    """
    return calculate(expression)


def reward(completions: list[list[dict[str, str]]], answer: list[str], **_: object) -> list[float]:
    """The score of each trajectory's last message."""
    return [score(completion[-1]["content"], right) for completion, right in zip(completions, answer, strict=True)]


class Told(TrainerCallback):
    """Reports the end of each step."""

    def __init__(self, work: Work, events: Events) -> None:
        self._work, self._events = work, events

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **_: Any,
    ) -> None:
        """After every step, with the metrics of that step."""
        if logs and "completions/mean_length" in logs:
            tokens = logs["completions/mean_length"] * self._work.batch
            calls = logs["tools/call_frequency"] * self._work.batch
            self._events.step(state.global_step, own_cpu(), tokens=tokens, calls=calls, reward=logs["reward"])


def main() -> None:
    """The work in the file that is the argument."""
    work = Work.read(sys.argv[1])
    torch.set_num_threads(work.threads)
    transformers.set_seed(work.seed)
    tokenizer = AutoTokenizer.from_pretrained(work.model)
    tokenizer.response_template = qwen3_template  # the same calls as Qwen3's; TRL knows it by its own chat template
    rows = [
        {"prompt": [{"role": "user", "content": row["question"]}], "answer": row["answer"]}
        for row in work.rows()[: work.prompts * (work.warm + work.steps)]
    ]
    passes = work.batch // work.micro_batch
    config = GRPOConfig(
        output_dir=f"{work.folder}/trl",
        use_cpu=work.device == "cpu",
        bf16=work.device == "cuda",
        max_steps=work.warm + work.steps,
        per_device_train_batch_size=work.micro_batch,
        gradient_accumulation_steps=passes,
        steps_per_generation=passes,
        num_generations=work.samples,
        max_completion_length=work.max_response,
        max_tool_calling_iterations=work.turns - 1,
        temperature=1.0,
        beta=0.0,
        loss_type="bnpo",
        learning_rate=work.learning_rate,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=WARM_UP,
        adam_beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=1.0,
        gradient_checkpointing=False,
        shuffle_dataset=False,
        save_strategy="no",
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        seed=work.seed,
        model_init_kwargs={"dtype": "float32"},
    )
    events = Events(work)
    trainer = GRPOTrainer(
        model=work.model,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        tools=[calculator],
        callbacks=[Told(work, events)],
    )
    trainer.train()
    events.end()


if __name__ == "__main__":
    main()
