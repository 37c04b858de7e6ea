"""The work of a training step, which each contender of `step.py` does: the same model, prompts, tools and batch.

Without Trackway and, except for `scripted_model`, without torch: TRL's environment imports it too.
"""

import json
import re
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

SILENCE_S = 600.0
"""A contender that reports no step for so long has failed."""
WARM_UP = 5
"""Steps in which the learning rate rises, as in the demo."""
TOKENS_OF_TURN = 18
"""About as many as a call and its observation have."""
_PROMPT_TOKENS = 48
_TOKENS_OF_PASS = 16_384
_CALL = re.compile(r'<tool_call>\s*\{"name": "calculator", "arguments": \{"expression": "([^"]*)"\}\}\s*</tool_call>')
_EXPRESSION = re.compile(r"(-?\d+) *([-+*/]) *(-?\d+)")


@dataclass(frozen=True)
class Work:
    """What a contender does, read from the file that is its argument."""

    folder: str
    """With `rows.json`, and for what the contender writes."""
    model: str
    """Hugging Face folder."""
    prompts: int
    samples: int
    """Trajectories of each prompt."""
    turns: int
    """Most turns of the model in a trajectory."""
    warm: int
    """Steps before the first that counts."""
    steps: int
    """Steps that count."""
    threads: int
    """Of torch in TRL and in the plain loop."""
    tracing: bool
    """Whether Trackway traces as many prompts as in the demo."""
    seed: int
    device: str
    """`cpu`, in float32, or `cuda`, in bfloat16."""
    learning_rate: float
    """After a warm-up of `WARM_UP` steps."""

    @property
    def batch(self) -> int:
        """Trajectories of a step."""
        return self.prompts * self.samples

    @property
    def max_response(self) -> int:
        """Bound on the tokens of a trajectory after its prompt."""
        return 28 + TOKENS_OF_TURN * self.turns

    @property
    def micro_batch(self) -> int:
        """Trajectories of a forward and backward pass: the largest share of the batch with at most 16,384 tokens."""
        most = max(1, _TOKENS_OF_PASS // (_PROMPT_TOKENS + TOKENS_OF_TURN * self.turns))
        return max(size for size in range(1, min(self.batch, most) + 1) if self.batch % size == 0)

    def rows(self) -> list[dict[str, str]]:
        """Question and answer of each prompt, in the order of the steps."""
        return json.loads(Path(self.folder, "rows.json").read_text())

    def save(self) -> Path:
        """The path of the file that `read` reads."""
        path = Path(self.folder, "work.json")
        path.write_text(json.dumps(asdict(self)))
        return path

    @classmethod
    def read(cls, path: str) -> "Work":
        """The work in a file."""
        return cls(**json.loads(Path(path).read_text()))


@dataclass
class Events:
    """What a contender tells `step.py`: a line of JSON each in `events.jsonl`."""

    work: Work
    _began: float = field(default_factory=time.perf_counter)

    def step(self, number: int, cpu_s: Mapping[str, float], **values: float) -> None:
        """The end of a step: the clock, and CPU seconds so far by process."""
        busy = psutil.cpu_times()
        self._write(
            step=number,
            clock_s=time.perf_counter() - self._began,
            cpu_s=dict(cpu_s),
            machine_s=busy.user + busy.nice + busy.system,
            **values,
        )

    def end(self, **values: object) -> None:
        """What the contender found out about the whole run; by default its niceness."""
        self._write(end=values or {"niceness": {"process": psutil.Process().nice()}})

    def _write(self, **event: object) -> None:
        with Path(self.work.folder, "events.jsonl").open("a") as file:
            file.write(json.dumps(event) + "\n")


def own_cpu() -> dict[str, float]:
    """CPU seconds of this process."""
    return {"process": time.process_time()}


def called(text: str) -> str | None:
    """The expression of the call in a turn; None without a call."""
    found = _CALL.search(text)
    return found and found.group(1)


def calculate(expression: str) -> str:
    """The result of an operation on two whole numbers, or what is wrong with it."""
    found = _EXPRESSION.fullmatch(expression.strip())
    if found is None:
        return f"Error: expected two numbers and an operation, got {expression!r}"
    left, right = int(found[1]), int(found[3])
    match found[2]:
        case "+":
            return str(left + right)
        case "-":
            return str(left - right)
        case "*":
            return str(left * right)
        case _:
            return f"{left / right:g}" if right else "Error: division by zero"


def score(text: str, answer: str) -> float:
    """1 when the last `#### N` is the answer."""
    said = re.findall(r"#### (-?[0-9.,]+)", text)
    return float(bool(said) and said[-1] == answer)


SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 3, "num_key_value_heads": 3}
    | {"head_dim": 32, "intermediate_size": 192},
    "5m": {"hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2}
    | {"head_dim": 64, "intermediate_size": 768},
    "358m": {"hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2}
    | {"head_dim": 64, "intermediate_size": 4864},
}
"""By the number of parameters, of `tiny` 0.28 million; the last is Qwen2.5-0.5B's, without its vocabulary."""


def scripted_model(folder: Path, shape: str, tokenizer: Path) -> None:
    """Save a Qwen3 of random weights that calls the calculator in every turn: 8 tokens, `1+6` to `5*9`.

    No layer adds to the residual stream (its output projections are zero), so that the next token depends on the last
    alone; all of them are computed.
    """
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    for file in tokenizer.iterdir():
        if file.suffix != ".safetensors" and file.name != "config.json":
            shutil.copy(file, folder)
    words = AutoTokenizer.from_pretrained(tokenizer)
    torch.manual_seed(0)
    config = Qwen3Config(
        **SHAPES[shape],
        vocab_size=len(words),
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        eos_token_id=words.eos_token_id,
        pad_token_id=words.pad_token_id,
    )
    model = Qwen3ForCausalLM(config)

    def ids(text: str) -> list[int]:
        return words.encode(text, add_special_tokens=False)

    call = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "1+6"}}\n</tool_call><|im_end|>'
    opened, scaffold, _, _, _, closed, ended, stop = ids(call)
    first, second, operators = ids("12345"), ids("6789"), ids("+-*")
    follows = {
        **{ids("<|im_start|>assistant\n")[-1]: [opened], opened: [scaffold], scaffold: first, closed: [ended]},
        **dict.fromkeys(first, operators),
        **dict.fromkeys(operators, second),
        **{digit: [closed] for digit in second},
        ended: [stop],
    }
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
            layer.mlp.down_proj.weight.zero_()  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
        embedded, head = model.model.embed_tokens.weight, model.lm_head.weight
        embedded.zero_()
        head.zero_()
        embedded[:, -1] = 1.0  # any other token, after which all are equally likely
        scale = 30.0 / config.hidden_size**0.5  # RMSNorm makes a unit vector as long as the root of its size
        for place, (token, nexts) in enumerate(follows.items()):
            embedded[token] = 0.0
            embedded[token, place] = 1.0
            head[nexts, place] = scale
    model.save_pretrained(folder)
