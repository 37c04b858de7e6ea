"""Tinker's SDK, unmodified, through its calls: `python -W ignore -m tests.e2e.tinker_calls URL KEY`. Prints JSON.

Between the acknowledgement of a sample and its result it waits for a line on standard input.
"""

import json
import sys
from typing import Any

import tinker
from tinker import types


def main() -> None:
    url, key = sys.argv[1:]
    service = tinker.ServiceClient(base_url=url, api_key=key)
    trainer = service.create_lora_training_client(base_model="tiny", rank=8, seed=1, train_unembed=False).result()
    plain: Any = {"target_tokens": [2, 3, 4]}
    rewarded: Any = {**plain, "logprobs": [0.0, -0.1, -0.2], "advantages": [0.0, 1.0, 1.0]}
    plain, rewarded = (types.Datum(types.ModelInput.from_ints([1, 2, 3]), inputs) for inputs in (plain, rewarded))
    prompt, params = types.ModelInput.from_ints([1, 2, 3]), types.SamplingParams(max_tokens=4, seed=3, stop=["\n"])
    before = trainer.forward([plain], "cross_entropy").result()
    backward = trainer.forward_backward([rewarded, rewarded], "importance_sampling")
    step = trainer.optim_step(types.AdamParams(learning_rate=1e-2))
    ppo = trainer.forward_backward([rewarded], "ppo", {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2})
    backward, step, ppo = backward.result(), step.result(), ppo.result()
    saved = trainer.save_state("first").result().path
    sampler = trainer.save_weights_and_get_sampling_client().result()
    drawing = sampler.sample(prompt, 2, params)
    first = drawing.result()
    print("drawn", flush=True)
    sys.stdin.readline()
    again = sampler.sample(prompt, 2, params).result()
    scores = sampler.compute_logprobs(prompt).result()
    published = trainer.save_weights_for_sampler("p").result().path
    named = service.create_sampling_client(model_path=published).result().compute_logprobs(prompt).result()
    base = service.create_sampling_client(base_model="tiny").result().compute_logprobs(prompt).result()
    copy = service.create_training_client_from_state_with_optimizer(saved).result()
    after, copied = (client.forward([plain], "cross_entropy").result() for client in (trainer, copy))
    service.close("success").result()
    result = {
        "session": trainer.model_id.partition(":")[0],
        "losses": [output.metrics["loss:sum"] for output in (before, after, copied)],
        "logprobs": [[out["logprobs"].data for out in output.loss_fn_outputs] for output in (backward, ppo)],
        "metrics": step.metrics,
        "drawn": [[sequence.tokens for sequence in response.sequences] for response in (first, again)],
        "scores": [scores, named, base],
        "paths": [saved, published],
    }
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
