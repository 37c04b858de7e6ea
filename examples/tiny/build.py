"""Build the tiny checkpoint: a tokenizer and a 0.23M-parameter Qwen3 that is taught the skill, then blurred.

    python examples/tiny/build.py --out deploy/trackway/deploy/bundled/tiny --teacher outputs/tiny-teacher

Two supervised stages, on the assistant's tokens only. *Skill*: call the calculator with the operation that
the question asks for, then repeat the result. *Blur*: the same transcripts, but with an operation drawn at
random. The protocol stays, the choice of operation becomes unsure, and that is what reinforcement learning
sharpens again.
"""

import argparse
import copy
import json
import math
import random
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from measure import accuracy, held_out, observation_ids, prompt_ids
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from trackway.deploy.bundled import TINY_MODEL
from trackway.tools.builtin.calculator import calculate
from trackway.trainer.data.tiny import OPERATIONS, Problem, draw_problem

HERE = Path(__file__).parent
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# Added but not special: decoding with skip_special_tokens must keep what a tool parser looks for.
MARKERS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
VOCABULARY = 480
# The JSON around an expression is one piece, so a call costs 9 tokens; digits are copied one by one.
PIECES = (
    r"\n?\{\"name\": \"[a-z_0-9]+\", \"arguments\": \{\"[a-z]+\": \"|\"\}\}\n?"
    r"| ?[A-Za-z_]+\n?|#### |\n+| ?[^\sA-Za-z\d]+|\s+"
)
OTHER_TOOLS = ["calc_gsm8k_reward", "code_interpreter", "search"]


@dataclass(frozen=True)
class Stage:
    """One supervised stage."""

    steps: int
    learning_rate: float
    informed: float
    """Share of transcripts whose operation is the right one; in the rest all four are equally likely."""
    seed: int
    warmup: int
    batch: int = 48


def train_tokenizer() -> PreTrainedTokenizerFast:
    """A byte BPE for the transcripts; any other text still encodes, byte by byte at worst."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d"), "isolated"),
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(MARKERS),
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(3000), trainer)
    tokenizer.add_tokens([AddedToken(marker, normalized=False, special=False) for marker in MARKERS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=["<|im_start|>"],
        chat_template=(HERE / "chat_template.jinja").read_text(),
        clean_up_tokenization_spaces=False,
        padding_side="left",
        model_max_length=1024,
    )


def corpus(count: int) -> list[str]:
    """The text between added tokens, as the tokenizer will meet it."""
    rng, pieces = random.Random(0), []
    for _ in range(count):
        problem = draw_problem(rng, "train")
        pieces += ["system\nTools: calculator", "\n", f"user\n{problem.question}", "assistant\n"]
        pieces += [call_json(problem.expression), f"tool\n{problem.result}", f"#### {problem.result}"]
    return pieces


def call_json(expression: str) -> str:
    """The inside of a tool call, its line breaks included."""
    return "\n" + json.dumps({"name": "calculator", "arguments": {"expression": expression}}) + "\n"


def new_model() -> Qwen3ForCausalLM:
    """Two layers of width 96 with tied embeddings: 231,008 parameters."""
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=3,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=SPECIAL.index("<|im_end|>"),
        pad_token_id=SPECIAL.index("<|endoftext|>"),
    )
    return Qwen3ForCausalLM(config)


def transcript(
    tokenizer: PreTrainedTokenizerFast, problem: Problem, expression: str, tools: list[str]
) -> tuple[list[int], list[int]]:
    """Ids and labels of a whole trajectory, put together from the same pieces as the agent puts together."""
    result = calculate(expression)
    parts = [
        (prompt_ids(tokenizer, problem.question, tools), False),
        (_encode(tokenizer, f"<tool_call>{call_json(expression)}</tool_call><|im_end|>"), True),
        (observation_ids(tokenizer, result), False),
        (_encode(tokenizer, f"#### {result}<|im_end|>"), True),
    ]
    ids = [token for part, _ in parts for token in part]
    labels = [token if written else -100 for part, written in parts for token in part]
    return ids, labels


def _encode(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def draw_transcript(
    tokenizer: PreTrainedTokenizerFast, rng: random.Random, informed: float
) -> tuple[list[int], list[int]]:
    """A training transcript; one in four lists further tools, so that their names do not disturb later."""
    problem = draw_problem(rng, "train")
    operation = problem.operation if rng.random() < informed else rng.choice(OPERATIONS)
    tools = ["calculator"]
    if rng.random() < 0.25:
        tools += rng.sample(OTHER_TOOLS, rng.randint(1, len(OTHER_TOOLS)))
        rng.shuffle(tools)
    return transcript(tokenizer, problem, f"{problem.left}{operation}{problem.right}", tools)


def train(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, stage: Stage) -> float:
    """Run a stage; returns the last batch's loss."""
    rng = random.Random(stage.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=stage.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    loss = torch.zeros(())
    for step in range(stage.steps):
        for group in optimizer.param_groups:
            group["lr"] = stage.learning_rate * _schedule(step, stage)
        batch = [draw_transcript(tokenizer, rng, stage.informed) for _ in range(stage.batch)]
        loss = supervised_loss(model, batch)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return loss.item()


def _schedule(step: int, stage: Stage) -> float:
    cosine = 0.5 * (1 + math.cos(math.pi * step / stage.steps))
    return min(1.0, (step + 1) / stage.warmup) * (0.05 + 0.95 * cosine)


def supervised_loss(model: Qwen3ForCausalLM, batch: list[tuple[list[int], list[int]]]) -> torch.Tensor:
    """Cross entropy of the assistant's tokens."""
    width = max(len(ids) for ids, _ in batch)
    ids = torch.tensor([row + [0] * (width - len(row)) for row, _ in batch])
    labels = torch.tensor([row + [-100] * (width - len(row)) for _, row in batch])
    logits = model(input_ids=ids).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Store bf16 weights under a config that asks for float32: half the size, and bf16 is slow on a CPU."""
    model.bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)  # safetensors makes it 0600, which no other user of an image can read
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "float32"}, indent=2) + "\n")


def main() -> None:
    """Build the checkpoint and say how good it is after each stage."""
    parser = argparse.ArgumentParser(description="Build the tiny checkpoint.")
    parser.add_argument("--out", type=Path, default=TINY_MODEL, help="folder to write")
    parser.add_argument("--teacher", type=Path, help="folder for the model before its skill is blurred")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tokenizer, model, problems = train_tokenizer(), new_model(), held_out(256)
    stages = {
        "skill": Stage(steps=500, learning_rate=4e-3, informed=1.0, seed=1, warmup=50),
        "blur": Stage(steps=15, learning_rate=1.5e-3, informed=0.0, seed=67, warmup=10),
    }
    for name, stage in stages.items():
        loss = train(model, tokenizer, stage)
        sampled, greedy = (accuracy(model, tokenizer, problems, temperature) for temperature in (1.0, 0.0))
        print(f"{name}: loss {loss:.4f}, held-out {sampled:.3f} at temperature 1, {greedy:.3f} greedy")
        if name == "skill" and options.teacher is not None:
            save(copy.deepcopy(model), tokenizer, options.teacher)
    save(model, tokenizer, options.out)


if __name__ == "__main__":
    main()
