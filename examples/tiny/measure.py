"""Held-out accuracy of a tiny checkpoint, in one process and without the services.

python examples/tiny/measure.py deploy/trackway/deploy/bundled/tiny --problems 256
"""

import argparse
import json
import random
import re
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from trackway.gsm8k import score
from trackway.tools.builtin.calculator import calculate
from trackway.trainer.data.tiny import Problem, draw_problem
from trackway.wire.chat import FunctionSchema, Message, ToolSchema

CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)
MAX_NEW_TOKENS = 32
MAX_ASSISTANT_TURNS = 2


def tool_schemas(names: list[str]) -> list[dict[str, object]]:
    """What the chat template is given; it renders names only."""
    return [ToolSchema(function=FunctionSchema(name=name)).model_dump() for name in names]


def prompt_ids(tokenizer: PreTrainedTokenizerFast, question: str, tools: list[str]) -> list[int]:
    """The prompt of a problem, up to and with the assistant's header."""
    messages = [Message(role="user", content=question).model_dump(exclude_none=True)]
    text = tokenizer.apply_chat_template(
        messages, tools=[*tool_schemas(tools)], add_generation_prompt=True, tokenize=False
    )
    return tokenizer.encode(str(text), add_special_tokens=False)


def observation_ids(tokenizer: PreTrainedTokenizerFast, result: str) -> list[int]:
    """What follows the model's end of turn: the rest of its line, the tool's message, the next header."""
    text = f"\n<|im_start|>tool\n{result}<|im_end|>\n<|im_start|>assistant\n"
    return tokenizer.encode(text, add_special_tokens=False)


def tool_result(text: str) -> str | None:
    """The answer to the tool call in a turn; None when the turn holds no call."""
    match = CALL.search(text)
    if match is None:
        return None
    try:
        return calculate(str(json.loads(match[1])["arguments"]["expression"]))
    except (ValueError, KeyError, TypeError) as error:
        return f"Error: {error}"


@torch.no_grad()
def generate(
    model: PreTrainedModel, prompts: list[list[int]], eos: int, temperature: float, generator: torch.Generator
) -> list[list[int]]:
    """One continuation of each prompt, its end-of-turn token included; temperature 0 is greedy."""
    width = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[eos] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    positions, cache = (mask.cumsum(-1) - 1).clamp(min=0), DynamicCache()
    done, columns = torch.zeros(len(prompts), dtype=torch.bool), []
    while len(columns) < MAX_NEW_TOKENS and not done.all():
        output = model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            logits_to_keep=1,
        )
        token = _draw(output.logits[:, -1], temperature, generator)
        columns.append(torch.where(done, -1, token))
        done = done | (token == eos)
        ids, positions = token[:, None], positions[:, -1:] + 1
        mask = torch.cat([mask, torch.ones_like(ids)], dim=1)
    return [[token for token in row if token >= 0] for row in torch.stack(columns, dim=1).tolist()]


def _draw(logits: torch.Tensor, temperature: float, generator: torch.Generator) -> torch.Tensor:
    if temperature == 0:
        return logits.argmax(-1)
    return torch.multinomial((logits.float() / temperature).softmax(-1), 1, generator=generator).squeeze(1)


def accuracy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    problems: list[Problem],
    temperature: float = 1.0,
    tools: list[str] | None = None,
) -> float:
    """The share of problems answered correctly, one trajectory each."""
    generator = torch.Generator().manual_seed(0)
    (eos,) = tokenizer.encode("<|im_end|>", add_special_tokens=False)
    contexts = {index: prompt_ids(tokenizer, p.question, tools or ["calculator"]) for index, p in enumerate(problems)}
    correct = 0
    for _ in range(MAX_ASSISTANT_TURNS):
        if not contexts:
            break
        turns = generate(model, list(contexts.values()), eos, temperature, generator)
        continued: dict[int, list[int]] = {}
        for (index, context), turn in zip(contexts.items(), turns, strict=True):
            text = str(tokenizer.decode(turn))
            result = tool_result(text)
            if result is None:
                correct += int(score(text, str(problems[index].result)))
            else:
                continued[index] = context + turn + observation_ids(tokenizer, result)
        contexts = continued
    return correct / len(problems)


def held_out(count: int, seed: int = 0) -> list[Problem]:
    """Problems on number pairs that training never sees."""
    rng = random.Random(f"evaluate/{seed}")
    return [draw_problem(rng, "test") for _ in range(count)]


def main() -> None:
    """Print the accuracy of a checkpoint at temperature 1 and greedy."""
    parser = argparse.ArgumentParser(description="Measure a tiny checkpoint on held-out problems.")
    parser.add_argument("checkpoint", type=Path, help="folder with the model and its tokenizer")
    parser.add_argument("--problems", type=int, default=256, help="how many held-out problems")
    parser.add_argument("--tools", nargs="+", default=["calculator"], help="tool names that the prompt lists")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(arguments.checkpoint)
    model = AutoModelForCausalLM.from_pretrained(arguments.checkpoint, dtype=torch.float32).eval()
    problems = held_out(arguments.problems)
    for label, temperature in (("temperature 1", 1.0), ("greedy", 0.0)):
        share = accuracy(model, tokenizer, problems, temperature, arguments.tools)
        print(f"{label}: {share:.3f} of {len(problems)} held-out problems")


if __name__ == "__main__":
    main()
