"""AdamW, its state by name, and its learning rate as a function of the update."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

from trackway.learner.ranks.sharding import local
from trackway.learner.weights.sharded_files import read_shards, saved_tensors
from trackway.run_config.policy import OptimConfig

MOMENTS = ("step", "exp_avg", "exp_avg_sq")


def new_optimizer(model: nn.Module, optim: OptimConfig) -> AdamW:
    """AdamW over the parameters that are trained."""
    return AdamW(
        [parameter for _, parameter in _trained(model)],
        lr=optim.lr,
        betas=optim.betas,
        weight_decay=optim.weight_decay,
        fused=True,
    )


def set_options(optimizer: AdamW, **options: float | tuple[float, float]) -> None:
    """Sets `lr`, `betas`, `eps` or `weight_decay` of the next steps."""
    for group in optimizer.param_groups:
        group.update(options)


def learning_rate(optim: OptimConfig, total: int, update: int) -> float:
    """The rate of the 0-based update, of `total`: lr / warm-up first, up in equal steps, then constant or a cosine.

    Half a cosine falls from lr to lr * min_lr_ratio at the end of the last update (verl's `lr_scheduler_type=cosine`,
    verl/utils/torch_functional.py, `get_cosine_schedule_with_warmup`).
    verl starts the warm-up at 0, so its first batch trains nothing.
    """
    warm_up = optim.warmup_updates(total)
    if update < warm_up:
        return optim.lr * (update + 1) / warm_up
    if optim.lr_scheduler_type == "constant":
        return optim.lr
    counted = update if optim.zero_indexed_step else update + 1
    done = min(1.0, (counted - warm_up) / max(1, total - warm_up))
    share = 0.5 * (1.0 + math.cos(2.0 * math.pi * optim.num_cycles * done))
    return optim.lr * (optim.min_lr_ratio + (1.0 - optim.min_lr_ratio) * share)


def state_tensors(optimizer: AdamW) -> Iterator[Tensor]:
    """Step counts and moments that this rank holds; none before the first step."""
    for state in optimizer.state.values():
        yield from local(state.values())


def named_state(optimizer: AdamW, model: nn.Module) -> dict[str, Tensor]:
    """AdamW's state of each trained parameter, as `<parameter>.<moment>`."""
    states = [(name, optimizer.state[parameter]) for name, parameter in _trained(model)]
    return {f"{name}.{key}": state[key] for name, state in states for key in state}


def load_optimizer(optimizer: AdamW, model: nn.Module, stem: Path) -> None:
    """Restores the saved `named_state`, the files of `stem`. A parameter without saved state gets none."""
    saved = saved_tensors(stem)
    state: dict[int, dict[str, Tensor]] = {}
    targets: dict[str, Tensor] = {}
    for index, (name, parameter) in enumerate(_trained(model)):
        if f"{name}.step" in saved:
            step = torch.zeros((), dtype=saved[f"{name}.step"].properties.dtype)
            moments = [torch.zeros_like(parameter.detach()) for _ in MOMENTS[1:]]
            state[index] = dict(zip(MOMENTS, (step, *moments), strict=True))
            targets |= {f"{name}.{key}": tensor for key, tensor in state[index].items()}
    read_shards(stem, targets)
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})


def restore_state(optimizer: AdamW, model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Restores a `named_state`, which is copied. A parameter without saved state gets none."""
    state = {
        index: {key: saved[f"{name}.{key}"].clone() for key in MOMENTS}
        for index, (name, _) in enumerate(_trained(model))
        if f"{name}.step" in saved
    }
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})


def _trained(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)


def step(optimizer: AdamW, model: nn.Module, clip_grad: float) -> tuple[float, bool]:
    """Clips, steps and clears the gradient. Returns its norm over all ranks before clipping, and whether it stepped.

    A step with a norm that is not finite would put NaN into every weight. It is skipped, as in verl.
    """
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip_grad)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    stepped = bool(torch.isfinite(norm))
    if stepped:
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return float(norm), stepped
