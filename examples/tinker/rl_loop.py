"""An RL loop of your own over Tinker's API: the tiny model learns to use the calculator. Start `trackway up` first."""

import asyncio
import os
from typing import Any

from tinker import AdamParams, Datum, ModelInput, SamplingParams, ServiceClient

from trackway.clients import RewardClient, ToolsClient
from trackway.trainer.data.tiny import make_tiny_rows
from trackway.wire.reward import ScoreRequest
from trackway.wire.tools import OneShotRequest

URL, TOKEN = os.environ.get("TRACKWAY_BASE_URL", "http://127.0.0.1:8000"), os.environ.get("TRACKWAY_TOKEN", "none")
SEED, STEPS = int(os.environ.get("SEED", "0")), int(os.environ.get("STEPS", "30"))
TOOL, PARAMS = {"type": "function", "function": {"name": "calculator"}}, SamplingParams(max_tokens=32, temperature=1.0)
train, test = make_tiny_rows("train", 12 * STEPS, SEED), make_tiny_rows("test", 64, SEED)
tools, rewards = ToolsClient(f"{URL}/tools", direct=True), RewardClient(f"{URL}/reward", direct=True, batches=True)
service = ServiceClient(base_url=os.environ.get("TINKER_BASE_URL", f"{URL}/trainer"), api_key=f"tml-{TOKEN}")
trainer = service.create_lora_training_client("tiny", rank=32, seed=SEED, train_unembed=False).result()
tokenizer: Any = trainer.get_tokenizer()


async def episode(sampler, row, prompt, reply):  # of one or two turns: (token, logprob, 1 for the model's), and reward
    turns = [(t, 0.0, 0) for t in prompt] + [(*pair, 1) for pair in zip(reply.tokens, reply.logprobs, strict=True)]
    if call := tokenizer.decode(reply.tokens).partition('"expression": "')[2].partition('"')[0]:
        run = tools.one_shot("calculator", OneShotRequest(arguments={"expression": call}))
        shown = getattr((await asyncio.gather(run, return_exceptions=True))[0], "text", "invalid") + "<|im_end|>"
        turns += [(t, 0.0, 0) for t in tokenizer.encode(f"\n<|im_start|>tool\n{shown}\n<|im_start|>assistant\n")]
        reply = (await sampler.sample(ModelInput.from_ints([turn[0] for turn in turns]), 1, PARAMS)).sequences[0]
        turns += [(*pair, 1) for pair in zip(reply.tokens, reply.logprobs, strict=True)]
    solution = {"solution_str": tokenizer.decode(reply.tokens), "ground_truth": row.reward_model.ground_truth}
    return turns, (await rewards.score(ScoreRequest(data_source=row.data_source, **solution), "rl_loop")).score


async def group(sampler, row):  # 8 episodes whose first turns share the prompt: their data, and their mean reward
    messages = [message.model_dump(exclude_none=True) for message in row.prompt]
    prompt = tokenizer.apply_chat_template(messages, [TOOL], add_generation_prompt=True, return_dict=False)
    firsts = (await sampler.sample(ModelInput.from_ints(prompt), 8, PARAMS)).sequences
    episodes = await asyncio.gather(*(episode(sampler, row, prompt, first) for first in firsts))
    data, mean = [], sum(reward for _, reward in episodes) / len(episodes)
    for turns, reward in episodes:
        inputs: Any = {"target_tokens": [turn[0] for turn in turns[1:]], "logprobs": [turn[1] for turn in turns[1:]]}
        inputs["advantages"] = [(reward - mean) * is_own for *_, is_own in turns[1:]]
        data.append(Datum(ModelInput.from_ints([turn[0] for turn in turns[:-1]]), inputs))
    return data, mean


async def main():
    for step, rows in enumerate([test, *(train[12 * step : 12 * step + 12] for step in range(STEPS)), test]):
        sampler = await trainer.save_weights_and_get_sampling_client()
        groups = await asyncio.gather(*(group(sampler, row) for row in rows))
        print(f"step {step}: accuracy {sum(mean for _, mean in groups) / len(rows):.3f}", flush=True)
        if rows is not test:
            trainer.forward_backward([datum for data, _ in groups for datum in data], "importance_sampling")
            await trainer.optim_step(AdamParams(learning_rate=2e-3 * (1 - step / (STEPS + 1))))
    await service.close("success")


asyncio.run(main())
