"""The training step as a plain loop in one process: a contender of `step.py`, and about what the model itself costs.

Trajectories of a step advance together, turn by turn, and keep their KV cache; one update follows.
"""

import sys
from dataclasses import dataclass, field
from typing import Any

import torch
from step_work import WARM_UP, Events, Work, calculate, called, own_cpu, score
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    set_seed,
)


@dataclass
class Rollout:
    """A trajectory: `ids` from its prompt on; `mask` is 1 and `logprobs` is set where the model wrote."""

    ids: list[int]
    answer: str
    mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""
    """Of the last turn."""

    def append(self, ids: list[int], logprobs: list[float] | None = None) -> None:
        """Tokens of the model, or without logprobs tokens that it reads."""
        self.ids += ids
        self.mask += [int(logprobs is not None)] * len(ids)
        self.logprobs += logprobs or [0.0] * len(ids)


class Generation:
    """Decodes for a batch of sequences on one KV cache, in which masked places are padding."""

    def __init__(self, model: PreTrainedModel, stop: int, size: int) -> None:
        self._model, self._stop = model, stop
        self._cache = DynamicCache()
        self._mask = torch.zeros(size, 0, dtype=torch.long)
        self._lengths = torch.zeros(size, dtype=torch.long)

    def keep(self, rows: list[int]) -> None:
        """Continue with these sequences alone."""
        if len(rows) < len(self._lengths):
            kept = torch.tensor(rows)
            self._cache.batch_select_indices(kept)
            self._mask, self._lengths = self._mask[kept], self._lengths[kept]

    def turn(self, blocks: list[list[int]], most: int) -> list[tuple[list[int], list[float]]]:
        """Read a block in each sequence, then write at most `most` tokens: ids and logprobs. The last, which the cache
        does not have yet, must begin the next block."""
        width = max(map(len, blocks))
        read = torch.tensor([[0] * (width - len(block)) + block for block in blocks])
        mask = torch.tensor([[0] * (width - len(block)) + [1] * len(block) for block in blocks])
        written: list[tuple[list[int], list[float]]] = [([], []) for _ in blocks]
        writing = torch.ones(len(blocks), dtype=torch.bool)
        logits = self._forward(read, mask)
        for _ in range(most):
            logprobs = logits.log_softmax(-1)
            tokens = logprobs.exp().multinomial(1)
            chosen = logprobs.gather(-1, tokens)
            for row in writing.nonzero()[:, 0].tolist():
                written[row][0].append(int(tokens[row]))
                written[row][1].append(float(chosen[row]))
            writing &= tokens[:, 0] != self._stop
            if not writing.any():
                break
            logits = self._forward(tokens, writing[:, None].long())
        return written

    def _forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Logits [B, V] after the last of ids [B, T]."""
        self._mask = torch.cat([self._mask, mask], 1)
        positions = (self._lengths[:, None] + mask.cumsum(1) - 1).clamp(min=0)
        self._lengths = self._lengths + mask.sum(1)
        found = self._model(
            input_ids=ids,
            attention_mask=self._mask,
            position_ids=positions,
            past_key_values=self._cache,
            logits_to_keep=1,
        )
        return found.logits[:, -1].float()


@torch.inference_mode()
def roll_out(
    work: Work, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, batch: list[Rollout]
) -> tuple[int, int]:
    """Extend the trajectories to their ends; returns how many tokens were sampled and how many tools called."""
    stop = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert isinstance(stop, int)
    generation, active, calls = Generation(model, stop, len(batch)), list(batch), 0
    blocks = [rollout.ids[:] for rollout in batch]
    for turn in range(work.turns):
        room = work.max_response - max(len(rollout.mask) for rollout in active)
        written = generation.turn(blocks, room)
        for rollout, (ids, logprobs) in zip(active, written, strict=True):
            rollout.append(ids, logprobs)
            rollout.text = tokenizer.decode(ids)  # pyright: ignore[reportAttributeAccessIssue]
        calling = [row for row, rollout in enumerate(active) if called(rollout.text) is not None]
        if turn == work.turns - 1 or not calling:
            break
        generation.keep(calling)
        active, blocks = [active[row] for row in calling], []
        for rollout in active:
            result = calculate(called(rollout.text) or "")
            observation = f"\n<|im_start|>tool\n{result}<|im_end|>\n<|im_start|>assistant\n"
            read = tokenizer.encode(observation, add_special_tokens=False)
            blocks.append([rollout.ids[-1], *read])
            rollout.append(read)
        calls += len(calling)
    return sum(sum(rollout.mask) for rollout in batch), calls


def update(work: Work, model: PreTrainedModel, optimizer: torch.optim.Optimizer, batch: list[Rollout]) -> float:
    """One GRPO update on the trajectories; returns the mean reward."""
    rewards = torch.tensor([score(rollout.text, rollout.answer) for rollout in batch]).view(-1, work.samples)
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)
    total = sum(sum(rollout.mask) for rollout in batch)
    optimizer.zero_grad()
    for start in range(0, len(batch), work.micro_batch):
        part = slice(start, start + work.micro_batch)
        loss = policy_loss(model, batch[part], advantages.flatten()[part])
        (loss / total).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return float(rewards.mean())


def policy_loss(model: PreTrainedModel, batch: list[Rollout], advantages: Tensor) -> Tensor:
    """PPO's clipped loss, summed over the tokens that the model wrote."""
    width = max(len(rollout.ids) for rollout in batch)

    def padded(rows: list[list[float]]) -> Tensor:
        return torch.tensor([row + [0.0] * (width - len(row)) for row in rows])

    prompts = [len(rollout.ids) - len(rollout.mask) for rollout in batch]
    ids = padded([[float(token) for token in rollout.ids] for rollout in batch]).long()
    present = padded([[1.0] * len(rollout.ids) for rollout in batch])
    mask = padded([[0.0] * size + [*map(float, rollout.mask)] for size, rollout in zip(prompts, batch, strict=True)])
    old = padded([[0.0] * size + rollout.logprobs for size, rollout in zip(prompts, batch, strict=True)])
    logits = model(input_ids=ids, attention_mask=present.long(), use_cache=False).logits[:, :-1]
    logprobs = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    ratio = ((logprobs - old[:, 1:]) * mask[:, 1:]).exp()
    gain = torch.minimum(ratio * advantages[:, None], ratio.clamp(0.8, 1.2) * advantages[:, None])
    return -(gain * mask[:, 1:]).sum()


def main() -> None:
    """The work in the file that is the argument."""
    work = Work.read(sys.argv[1])
    torch.set_num_threads(work.threads)
    set_seed(work.seed)
    tokenizer = AutoTokenizer.from_pretrained(work.model)
    model = AutoModelForCausalLM.from_pretrained(work.model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=work.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    rows, events = work.rows(), Events(work)
    for step in range(work.warm + work.steps):
        batch = [
            Rollout(prompt(tokenizer, row["question"]), row["answer"])
            for row in rows[step * work.prompts : (step + 1) * work.prompts]
            for _ in range(work.samples)
        ]
        tokens, calls = roll_out(work, model, tokenizer, batch)
        for group in optimizer.param_groups:
            group["lr"] = work.learning_rate * min(1.0, (step + 1) / WARM_UP)
        reward = update(work, model, optimizer, batch)
        events.step(step + 1, own_cpu(), tokens=tokens, calls=calls, reward=reward)
    events.end()


def prompt(tokenizer: PreTrainedTokenizerBase, question: str) -> list[int]:
    """The prompt's token ids, with the calculator offered."""
    tools: list[Any] = [{"type": "function", "function": {"name": "calculator"}}]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], tools=tools, add_generation_prompt=True, tokenize=False
    )
    assert isinstance(text, str)
    return tokenizer.encode(text, add_special_tokens=False)


if __name__ == "__main__":
    main()
