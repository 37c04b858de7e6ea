"""AdamW as safetensors, and its learning rate as a function of the update."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.optim import AdamW

MOMENTS = ("step", "exp_avg", "exp_avg_sq")


def warmed_up(lr: float, update: int, warmup_steps: int) -> float:
    """The rate of the 0-based update: lr / warmup_steps first, then up in equal steps, then constant.

    verl begins the climb at 0, which spends its first batch on nothing.
    """
    return lr * min(1.0, (update + 1) / max(1, warmup_steps))


def save_optimizer(optimizer: AdamW, model: nn.Module, file: Path) -> None:
    """AdamW's state of each named parameter, as `<parameter>.<moment>`."""
    states = [(name, optimizer.state[parameter]) for name, parameter in model.named_parameters()]
    tensors = {f"{name}.{key}": state[key].cpu().contiguous() for name, state in states for key in state}
    save_file(tensors, file)


def load_optimizer(optimizer: AdamW, model: nn.Module, file: Path) -> None:
    """Puts the saved state back; a parameter that had none gets none."""
    saved = load_file(file)
    state = {}
    for index, (name, _) in enumerate(model.named_parameters()):
        if f"{name}.step" in saved:
            state[index] = {key: saved[f"{name}.{key}"] for key in MOMENTS}
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})


def step(optimizer: AdamW, model: nn.Module, clip_grad: float) -> tuple[float, bool]:
    """Clips, steps and clears the gradient; returns its norm before clipping, and whether it stepped.

    A norm that is not finite would put NaN into every weight: the step is left out, as in verl.
    """
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip_grad)
    stepped = bool(torch.isfinite(norm))
    if stepped:
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return float(norm), stepped
