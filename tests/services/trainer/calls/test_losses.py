"""Losses of calls: Tinker's formulas, and the same gradients as the fit loop's."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.services.trainer.calls.requests import request_of
from tests.services.trainer.learner_settings import learner_config, logprobs_of
from trackway.learner.learner import Learner
from trackway.trainer.calls import losses
from trackway.trainer.calls.losses import forward_backward
from trackway.trainer.calls.protobuf import LOSSES, decode
from trackway.wire.trajectory import Trajectory

pytestmark = pytest.mark.slow

Data = list[tuple[list[int], dict[str, Any]]]
DRAW = random.Random(7)
OPTIONS: dict[str, dict[str, float]] = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1},
    "cispo": {"clip_low_threshold": 0.7, "clip_high_threshold": 1.3},
    "dro": {"beta": 0.3},
    "gspo": {"clip_low_threshold": 0.95, "clip_high_threshold": 1.05},
}


def datum(loss_fn: str, length: int, logprobs: Sequence[float] | None = None) -> tuple[list[int], dict[str, Any]]:
    tokens = [DRAW.randrange(3, 64) for _ in range(length + 1)]
    inputs: dict[str, Any] = {"target_tokens": tokens[1:]}
    if loss_fn == "cross_entropy":
        inputs["weights"] = [DRAW.uniform(-1, 2) for _ in range(length)]
        return tokens[:-1], inputs
    inputs["logprobs"] = [-DRAW.uniform(4, 8) for _ in range(length)]
    inputs["advantages"] = [0.0, *(DRAW.choice([-1.5, 0.7, 1.0]) for _ in range(length - 1))]
    if loss_fn == "gspo":
        inputs["sequence_ratio_mask"] = [0.0, *(float(DRAW.random() < 0.7) for _ in range(length - 2)), 1.0]
    return tokens[:-1], inputs


def near(learner: Learner, data: Data) -> Data:
    """The data with sampler's logprobs near the learner's, so that some ratios are clipped and others are not."""
    for tokens, inputs in data:
        if "logprobs" in inputs:
            policy = logprobs_of(learner, [*tokens, inputs["target_tokens"][-1]])
            inputs["logprobs"] = [value + DRAW.uniform(-0.4, 0.4) for value in policy]
    return data


def expected(loss_fn: str, options: dict[str, float], logp: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    """Tinker's formulas for one datum, all [N]."""
    if loss_fn == "cross_entropy":
        return -(inputs["weights"] * logp).sum()
    q, a = inputs["logprobs"], inputs["advantages"]
    ratio = (logp - q).exp()
    if loss_fn == "importance_sampling":
        return -(ratio * a).sum()
    if loss_fn == "dro":
        return -(logp * a - 0.5 * options["beta"] * (logp - q) ** 2).sum()
    if loss_fn == "gspo":
        among = inputs["sequence_ratio_mask"] != 0
        ratio = ((logp.detach() - q)[among].mean() + logp - logp.detach()).exp()
    clipped = ratio.clamp(options["clip_low_threshold"], options["clip_high_threshold"])
    if loss_fn == "cispo":
        return -(clipped.detach() * logp * a).sum()
    return -torch.minimum(ratio * a, clipped * a).sum()


def gradients(learner: Learner) -> list[Tensor]:
    parameters = [parameter for parameter in learner.policy.model.parameters() if parameter.grad is not None]
    return [parameter.grad.clone() for parameter in parameters if parameter.grad is not None]


@pytest.mark.parametrize("remove_padding", [False, True])
@pytest.mark.parametrize("loss_fn", LOSSES)
def test_each_loss_and_its_gradient_have_tinkers_formula(tiny_model: Path, loss_fn: str, remove_padding: bool) -> None:
    tokens = {"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 24}
    learner = Learner(learner_config(tiny_model, dtype="float64", remove_padding=remove_padding, **tokens))
    data = near(learner, [datum(loss_fn, length) for length in (9, 4, 13, 1, 7) if loss_fn != "gspo" or length > 1])
    options = OPTIONS[loss_fn]

    output = forward_backward(learner, decode(request_of(data, loss_fn, options)))
    found = gradients(learner)
    learner.policy.model.zero_grad()
    total = torch.zeros((), dtype=torch.float64)
    for (tokens, inputs), logprobs in zip(data, output.logprobs, strict=True):
        logits = learner.policy.model(input_ids=torch.tensor([tokens])).logits[0]
        logp = logits.log_softmax(-1)[range(len(tokens)), inputs["target_tokens"]]
        as_sent = {name: torch.tensor(values).double() for name, values in inputs.items()}
        total = total + expected(loss_fn, options, logp, as_sent)
        torch.testing.assert_close(torch.from_numpy(logprobs).double(), logp.detach(), rtol=0, atol=1e-5)
    total.backward()

    assert output.loss == pytest.approx(total.item(), abs=1e-10)
    assert max(float(gradient.abs().max()) for gradient in found) > 0.01
    torch.testing.assert_close(found, gradients(learner), rtol=0, atol=1e-10)


def test_activations_that_fit_are_not_computed_again(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    learner = Learner(learner_config(tiny_model, dtype="float64", gradient_checkpointing=True))
    request = decode(request_of(near(learner, [datum("ppo", 9), datum("ppo", 5)]), "ppo", OPTIONS["ppo"]))
    [layer, *_] = (module for name, module in learner.policy.model.named_modules() if name.endswith("layers.0.mlp"))
    calls: list[object] = []
    layer.register_forward_pre_hook(lambda *_: calls.append(layer))
    found: list[list[Tensor]] = []
    for most in (2**30, 0):
        monkeypatch.setattr(losses, "MAX_ACTIVATIONS", most)
        forward_backward(learner, request)
        found.append([*gradients(learner), torch.tensor(len(calls))])
        learner.policy.model.zero_grad()
        calls.clear()
    assert [int(gradients.pop()) for gradients in found] == [1, 2]
    torch.testing.assert_close(*found, rtol=0, atol=1e-12)


def test_a_token_may_have_several_targets_with_weights(tiny_model: Path) -> None:
    learner = Learner(learner_config(tiny_model, dtype="float64"))
    wide = ([5, 6, 7], {"target_tokens": [[6, 9], [7, 3], [8, 4]], "weights": [[0.5, 0.5], [1.0, 0.0], [0.2, 0.8]]})
    narrow = ([5, 6], {"target_tokens": [6, 11], "weights": [1.0, 2.0]})

    output = forward_backward(learner, decode(request_of([wide, narrow], "cross_entropy")))
    found = gradients(learner)
    learner.policy.model.zero_grad()
    total = torch.zeros((), dtype=torch.float64)
    for (tokens, inputs), logprobs in zip([wide, narrow], output.logprobs, strict=True):
        targets = torch.tensor(inputs["target_tokens"])
        logp = learner.policy.model(input_ids=torch.tensor([tokens])).logits[0].log_softmax(-1)
        logp = logp.gather(1, targets.reshape(len(tokens), -1)).reshape(targets.shape)
        total = total - (torch.tensor(inputs["weights"]).double() * logp).sum()
        assert logprobs.shape == targets.shape
        torch.testing.assert_close(torch.from_numpy(logprobs).double(), logp.detach(), rtol=0, atol=1e-5)
    total.backward()

    assert output.loss == pytest.approx(total.item(), abs=1e-6)  # weights are sent in float32
    torch.testing.assert_close(found, gradients(learner), rtol=0, atol=1e-6)


def test_a_forward_request_leaves_the_gradient_as_it_was(tiny_model: Path) -> None:
    learner = Learner(learner_config(tiny_model))
    data = near(learner, [datum("ppo", 6)])

    forward = forward_backward(learner, decode(request_of(data, "ppo", forward_only=True)))
    assert gradients(learner) == []
    backward = forward_backward(learner, decode(request_of(data, "ppo")))

    assert forward.loss == backward.loss
    assert (forward.logprobs[0] == backward.logprobs[0]).all()
    once = gradients(learner)
    forward_backward(learner, decode(request_of(data, "ppo")))
    torch.testing.assert_close(gradients(learner), [2 * gradient for gradient in once])


def updated(learner: Learner, trajectories: list[Trajectory]) -> tuple[list[list[Tensor]], list[float]]:
    """The gradients that reach the optimizer step of an update, and the advantages of the trajectories."""
    seen: list[list[Tensor]] = []
    learner.optimizer.register_step_pre_hook(lambda *_: seen.append(gradients(learner)))
    return seen, learner.update(trajectories).advantages


@pytest.mark.parametrize(
    ("loss_fn", "mode", "options"),
    [
        ("ppo", "vanilla", {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}),
        ("importance_sampling", "vanilla", {}),
        ("cispo", "cispo", {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}),
        ("dro", "dro", {"beta": 0.1}),
        ("gspo", "gspo", {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}),
    ],
)
def test_a_request_has_the_gradient_of_the_fit_loops_update_on_the_same_batch(
    tiny_model: Path, rollout: Callable[..., Trajectory], loss_fn: str, mode: str, options: dict[str, float]
) -> None:
    keys: dict[str, Any] = {"loss_mode": mode, "loss_agg_mode": "token-sum", "clip_grad": 1e9, "clip_ratio_c": 1e8}
    # The sampler's logprobs of weights as new as the policy's are the old ones.
    keys |= {"bypass_mode": False, "proximal_logprobs": "loglinear", "rollout_is": None, "lora_rank": 4}
    keys["algorithm.norm_adv_by_std_in_grpo"] = False  # the advantages +-0.5 are exact in float32, as they are sent
    keys |= {"dro_beta": 0.1} if mode == "dro" else {}
    keys |= {"clip_ratio_low": 1.0, "clip_ratio_high": 1e8} if loss_fn == "importance_sampling" else {}
    learner, calls = (Learner(learner_config(tiny_model, dtype="float64", **keys)) for _ in range(2))
    trajectories, data, mask = list[Trajectory](), Data(), [1, 1, 0, 1, 1]
    for place in range(8):
        ids = [DRAW.randrange(3, 64) for _ in range(8)]
        own = logprobs_of(calls, ids)
        old = [float(np.float32(value + DRAW.uniform(-0.4, 0.4))) for value in own[2:]]
        response = {"response_ids": ids[3:], "response_mask": mask, "response_logprobs": old}
        trajectories.append(rollout(place // 4, place % 4, float(place % 2), prompt_ids=ids[:3], **response))
        inputs: dict[str, Any] = {"target_tokens": ids[1:], "logprobs": own[:2] + old}
        if loss_fn == "gspo":
            inputs["sequence_ratio_mask"] = [0.0, 0.0, *map(float, mask)]
        if loss_fn == "dro":  # its penalty counts every token, and this one is not the policy's
            inputs["logprobs"][4] = own[4]
        data.append((ids[:-1], inputs))

    [found], advantages = updated(learner, trajectories)
    for (_, inputs), advantage in zip(data, advantages, strict=True):
        inputs["advantages"] = [0.0, 0.0, *(advantage * trained for trained in mask)]
    forward_backward(calls, decode(request_of(data, loss_fn, options)))

    assert max(float(gradient.abs().max()) for gradient in found) > 1e-3
    torch.testing.assert_close(gradients(calls), found, rtol=0, atol=1e-6)
