"""An RL loop of your own over Tinker's API: the tiny model learns to use the calculator. Start `trackway up` first."""

import asyncio
import os
import re
from pathlib import Path
from typing import Any

import httpx
import tinker
from pyarrow import parquet
from tinker.types import AdamParams, Datum, ModelInput, SamplingParams

from trackway.trainer.data import make_tiny

URL, TOKEN = os.environ.get("TRACKWAY_BASE_URL", "http://127.0.0.1:8000"), os.environ.get("TRACKWAY_TOKEN", "none")
SEED, STEPS = int(os.environ.get("SEED", "0")), int(os.environ.get("STEPS", "30"))
PARAMS = SamplingParams(max_tokens=32, temperature=1.0)
make_tiny(Path("outputs/tinker"), train_size=12 * STEPS, test_size=64, seed=SEED)
train, test = (parquet.read_table(f"outputs/tinker/{name}.parquet").to_pylist() for name in ("train", "test"))
headers = {"authorization": f"Bearer {TOKEN}", "connection": "close"}  # as the proxy closes idle connections
http = httpx.AsyncClient(base_url=URL, headers=headers, timeout=60)
service = tinker.ServiceClient(base_url=f"{URL}/trainer", api_key=f"tml-{TOKEN}")
trainer = service.create_lora_training_client("tiny", rank=32, seed=SEED, train_unembed=False).result()
tokenizer: Any = trainer.get_tokenizer()


async def episode(sampler, row, prompt, reply):  # of one or two turns: tokens, logprobs, 1 for the model's, reward
    tokens, mask = prompt + reply.tokens, [0.0] * len(prompt) + [1.0] * len(reply.tokens)
    logprobs = [0.0] * len(prompt) + reply.logprobs
    if call := re.search(r'<tool_call>.*"expression": "([^"]*)"', tokenizer.decode(reply.tokens), re.DOTALL):
        answer = await http.post("/tools/tools/calculator/execute", json={"arguments": {"expression": call[1]}})
        shown = f"\n<|im_start|>tool\n{answer.json().get('text', 'invalid')}<|im_end|>\n<|im_start|>assistant\n"
        seen = tokenizer.encode(shown)
        reply = (await sampler.sample(ModelInput.from_ints(tokens + seen), 1, PARAMS)).sequences[0]
        tokens, mask = tokens + seen + reply.tokens, mask + [0.0] * len(seen) + [1.0] * len(reply.tokens)
        logprobs += [0.0] * len(seen) + reply.logprobs
    solution = {"solution_str": tokenizer.decode(reply.tokens), "ground_truth": row["reward_model"]["ground_truth"]}
    score = await http.post("/reward/score", json={"data_source": row["data_source"], **solution})
    return tokens, logprobs, mask, score.json()["score"]


async def group(sampler, row):  # 8 episodes whose first turns share the prompt: their data, and their mean reward
    tools = [{"type": "function", "function": {"name": "calculator"}}]
    prompt = tokenizer.apply_chat_template(row["prompt"], tools, add_generation_prompt=True, return_dict=False)
    firsts = (await sampler.sample(ModelInput.from_ints(prompt), 8, PARAMS)).sequences
    episodes = await asyncio.gather(*(episode(sampler, row, prompt, first) for first in firsts))
    data, mean = [], sum(reward for *_, reward in episodes) / len(episodes)
    for tokens, logprobs, mask, reward in episodes:
        inputs: Any = {"target_tokens": tokens[1:], "logprobs": logprobs[1:]}
        inputs["advantages"] = [weight * (reward - mean) for weight in mask[1:]]
        data.append(Datum(ModelInput.from_ints(tokens[:-1]), inputs))
    return data, mean


async def main():
    for step, rows in enumerate([test, *(train[12 * step : 12 * step + 12] for step in range(STEPS)), test]):
        sampler = await trainer.save_weights_and_get_sampling_client()
        groups = await asyncio.gather(*(group(sampler, row) for row in rows))
        print(f"step {step}: accuracy {sum(mean for _, mean in groups) / len(rows):.3f}", flush=True)
        if rows is not test:
            trainer.forward_backward([datum for data, _ in groups for datum in data], "importance_sampling")
            await trainer.optim_step(AdamParams(learning_rate=2e-3))
    await service.close("success")


asyncio.run(main())
