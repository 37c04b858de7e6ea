# pyright: reportMissingImports=false
"""Records verl 0.9.1's distillation losses in `verl_distillation.json`, which the tests compare ours with.

It needs verl, and not Trackway. In an environment of its own:

    pip install verl==0.9.1 tensordict torch numpy
    python tests/services/learner/verl_distillation.py

A batch is made from its number by `batch_of`, which the tests use too, from lists alone, so that no version of torch
changes it. Of a gradient with respect to the student's logits its products with two fixed directions are recorded.
"""

import json
import math
import random
from pathlib import Path
from typing import NamedTuple

VOCABULARY, TOP, BATCHES = 7, 3, 200
WITH_METRICS = 10
"""Batches whose metrics are recorded."""
RECORDS = Path(__file__).with_suffix(".json")
MODES = [
    *({"loss_mode": mode, "use_policy_gradient": True} for mode in ("k1", "k2", "k3", "abs")),
    *({"loss_mode": mode} for mode in ("k2", "k3", "abs", "mse", "low_var_kl", "forward_kl_topk")),
    {"loss_mode": "k3", "loss_max_clamp": 0.2},
    {"loss_mode": "k1", "use_policy_gradient": True, "loss_max_clamp": 0.3, "clip_ratio_low": 0.1},
    {"loss_mode": "forward_kl_topk", "log_prob_min_clamp": -2.0, "loss_max_clamp": 0.5},
]
AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")

Numbers = list[list[float]]


class Batch(NamedTuple):
    """B ragged rows, padded to T tokens."""

    logits: list[Numbers]
    """[B, T, V]: the student's."""
    teacher: list[Numbers]
    """[B, T, V]: the teacher's."""
    targets: list[list[int]]
    old: Numbers
    """[B, T]: old logprobs of the targets."""
    mask: list[list[bool]]
    directions: list[list[Numbers]]
    """Two of [B, T, V]."""
    aggregation: str


def batch_of(number: int) -> Batch:
    """The batch of a number: 1 to 3 rows of up to 6 tokens, with a token in each."""
    draw = random.Random(number)
    rows, width = draw.randint(1, 3), draw.randint(2, 6)

    def table() -> list[Numbers]:
        return [[[draw.gauss(0, 1.5) for _ in range(VOCABULARY)] for _ in range(width)] for _ in range(rows)]

    logits, teacher = table(), table()
    targets = [[draw.randrange(VOCABULARY) for _ in range(width)] for _ in range(rows)]
    old = [
        [logprobs(logits[row][place])[targets[row][place]] + draw.gauss(0, 0.3) for place in range(width)]
        for row in range(rows)
    ]
    mask = [[draw.random() < 0.7 for _ in range(width)] for _ in range(rows)]
    for row in mask:
        row[draw.randrange(width)] = True
    return Batch(logits, teacher, targets, old, mask, [table(), table()], AGGREGATIONS[number % 3])


def logprobs(logits: list[float]) -> list[float]:
    """Log-softmax."""
    total = math.log(sum(map(math.exp, logits)))
    return [value - total for value in logits]


def main() -> None:
    """Write the records."""
    import torch
    import verl.trainer.distillation.losses as losses
    from tensordict import TensorDict
    from verl.trainer.distillation.fsdp.losses import compute_forward_kl_topk
    from verl.workers.config import ActorConfig, DistillationConfig, DistillationLossConfig

    losses.no_padding_2_padding = lambda values, data: values
    torch.set_default_dtype(torch.float64)

    def recorded(number: int, settings: dict[str, object]) -> dict[str, object]:
        batch = batch_of(number)
        logits = torch.tensor(batch.logits, requires_grad=True)
        mask, targets = torch.tensor(batch.mask), torch.tensor(batch.targets).unsqueeze(-1)
        teacher = torch.log_softmax(torch.tensor(batch.teacher), -1)
        logp = torch.log_softmax(logits, -1).gather(-1, targets).squeeze(-1)
        defaults = {"topk": TOP, "loss_max_clamp": None, "log_prob_min_clamp": None, "use_policy_gradient": False}
        loss_config = DistillationLossConfig(**{**defaults, "use_task_rewards": False, **settings})
        config = DistillationConfig(distillation_loss=loss_config)
        actor = ActorConfig(
            strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, loss_agg_mode=batch.aggregation
        )
        output = {"log_probs": logp}
        if settings["loss_mode"] == "forward_kl_topk":
            top = teacher.topk(TOP, -1)
            nested = [
                torch.nested.as_nested_tensor([values.flatten(0, 1)], layout=torch.jagged)
                for values in (top.values, top.indices)
            ]
            flat = compute_forward_kl_topk(logits.flatten(0, 1).unsqueeze(0), *nested, config, "thd")
            output |= {name: value.reshape(mask.shape) for name, value in flat.items()}
        data = TensorDict(
            {
                "response_mask": mask,
                "old_log_probs": torch.tensor(batch.old),
                "teacher_logprobs": teacher.gather(-1, targets),
            }
        )
        sizes = {"dp_size": 1, "batch_num_tokens": int(mask.sum()), "global_batch_size": len(mask)}
        loss, metrics = losses.distillation_loss(actor, config, output, _With(data, sizes))
        (gradient,) = torch.autograd.grad(loss, logits)
        products = [float((gradient * torch.tensor(direction)).sum()) for direction in batch.directions]
        record: dict[str, object] = {"loss": float(loss), "products": products}
        if number < WITH_METRICS:
            values = {name: getattr(value, "values", [value])[0] for name, value in metrics.items()}
            record["metrics"] = {name: float(value) for name, value in values.items()}
        return record

    class _With(dict):  # a TensorDict that holds plain numbers too
        def __init__(self, data: TensorDict, numbers: dict[str, int]) -> None:
            super().__init__({**{key: data[key] for key in data}, **numbers})

    records = [[recorded(number, settings) for number in range(BATCHES)] for settings in MODES]
    RECORDS.write_text(json.dumps(_rounded(records), separators=(",", ":")) + "\n")


def _rounded(value: object) -> object:
    if isinstance(value, float):
        return float(f"{value:.10g}")
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    return [_rounded(inner) for inner in value] if isinstance(value, list) else value


if __name__ == "__main__":
    main()
