"""An RL loop over Tinker's SDK that is the same each time: `python -W ignore -m tests.e2e.tinker_loop URL KEY`.

It prints `<step> <place>` at each place where something may be killed, and goes on after a line on standard input. The
last line is JSON of all that it got.
"""

import json
import sys
from typing import Any

import tinker
from tinker import types

STEPS = 3
PROMPTS = [types.ModelInput.from_ints([1, 17, 9, 40, 5]), types.ModelInput.from_ints([1, 8, 33, 12])]


def at(step: int, place: str) -> None:
    print(f"{step} {place}", flush=True)
    sys.stdin.readline()


def data_of(trainer: tinker.TrainingClient, drawn: list[tuple[types.ModelInput, Any]]) -> list[types.Datum]:
    """The data of drawn sequences. The advantage is 1 for an even last token, else -1.

    The old logprobs come from the trainer. A sample's logprobs depend, by rounding, on the other samples of its batch.
    """
    data = []
    for prompt, sequence in drawn:
        tokens, id = sequence.tokens, sequence.sequence_id
        seen, advantage = prompt.to_ints(), 1.0 - 2.0 * (tokens[-1] % 2)
        inputs: Any = {"target_tokens": [*seen, *tokens][1:]}
        inputs["weights"] = [0.0] * (len(seen) - 1) + [advantage] * len(tokens)
        datum = types.Datum(types.ModelInput.from_ints([*seen, *tokens][:-1]), inputs)
        sampled = [types.SampledProvenanceSpan(sequence_id=id, length=len(tokens) - left) for left in (1, 0)]
        given = [types.PromptProvenanceSpan(sequence_id=id, offset=first, length=len(seen) - first) for first in (0, 1)]
        data.append(datum.with_provenance(model_input=[given[0], sampled[0]], loss_fn_inputs=[given[1], sampled[1]]))
    for datum, out in zip(data, trainer.forward(data, "cross_entropy").result().loss_fn_outputs, strict=True):
        datum.loss_fn_inputs["logprobs"] = out["logprobs"]
        datum.loss_fn_inputs["advantages"] = datum.loss_fn_inputs.pop("weights")
    return data


def main() -> None:
    url, key = sys.argv[1:]
    service = tinker.ServiceClient(base_url=url, api_key=key)
    trainer = service.create_lora_training_client(base_model="tiny", rank=8, seed=1, train_unembed=False).result()
    drawn, outputs = [], []
    for step in range(STEPS):
        publishing = trainer.save_weights_and_get_sampling_client()
        at(step, "publishing")
        sampler = publishing.result()
        params = types.SamplingParams(max_tokens=12, seed=step, temperature=2.0)
        drawing = [sampler.sample(prompt, 4, params) for prompt in PROMPTS]
        at(step, "sampling")
        sequences = [
            (prompt, sequence)
            for prompt, sampling in zip(PROMPTS, drawing, strict=True)
            for sequence in sampling.result().sequences
        ]
        drawn += [sequence.tokens for _, sequence in sequences]
        data = data_of(trainer, sequences)
        first = trainer.forward_backward(data[:4], "importance_sampling")
        second = trainer.forward_backward(data[4:], "ppo")
        at(step, "computing")
        outputs += [out["logprobs"].data for part in (first, second) for out in part.result().loss_fn_outputs]
        stepping = trainer.optim_step(types.AdamParams(learning_rate=1e-2))
        at(step, "stepping")
        outputs.append(stepping.result().metrics)
    saved = trainer.save_state("end").result().path
    service.close("success").result()
    print(json.dumps({"saved": saved, "drawn": drawn, "outputs": outputs}), flush=True)


if __name__ == "__main__":
    main()
