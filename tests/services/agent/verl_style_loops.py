"""Agent loops of our own in the shape of verl's published ones: they import verl's modules, which is not installed."""

# pyright: reportMissingImports=false, reportUntypedBaseClass=false

import json
import re
from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput, register
from verl.utils.profiler import simple_timer
from verl.utils.rollout_trace import rollout_trace_op


@register("verl_single")
class SingleLoop(AgentLoopBase):
    """Answers once."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.response_length = self.rollout_config.response_length

    @rollout_trace_op
    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        metrics: dict[str, Any] = {}
        prompt_ids = await self.ct_build_initial_tokens(list(kwargs["raw_prompt"]))
        with simple_timer("generate_sequences", metrics):
            output = await self.server_manager.generate(
                request_id=uuid4().hex, prompt_ids=prompt_ids, sampling_params=sampling_params, image_data=None
            )
        return AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=output.token_ids[: self.response_length],
            response_mask=[1] * len(output.token_ids[: self.response_length]),
            response_logprobs=output.log_probs,
            num_turns=2,
            metrics=metrics,
        )


class SumLoop(AgentLoopBase):
    """Adds up in its own code when the model asks to, as verl's React loops run their tools."""

    def __init__(self, *args: Any, bonus: float = 0.0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.bonus = bonus

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        messages = list(kwargs["raw_prompt"])
        prompt_ids = await self.apply_chat_template(messages)
        ids, mask, logprobs = list(prompt_ids), [], []
        turns = self.rollout_config.multi_turn.max_assistant_turns or 5
        rounds = 0
        for _ in range(turns):
            output = await self.server_manager.generate(
                "any id", prompt_ids=ids, sampling_params={**sampling_params, "max_tokens": 400}
            )
            merged, mask, logprobs = await self.ct_merge_assistant_token(
                ids, output.token_ids, mask, logprobs, output.log_probs
            )
            ids = merged.token_ids
            text = self.tokenizer.decode(output.token_ids)
            asked = re.search(r"<tool_call>(.*)</tool_call>", text, re.DOTALL)
            if asked is None:
                break
            rounds += 1
            message = {"role": "tool", "content": await self.add(json.loads(asked[1]))}
            merged, mask, logprobs = await self.ct_merge_non_assistant_msg(
                messages, [*messages, message], ids, mask, logprobs
            )
            ids = merged.token_ids
        return AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=ids[len(prompt_ids) :],
            response_mask=mask,
            num_turns=2 * rounds + 2,
            reward_score=self.bonus or None,
            metrics={"tool_calls": 0.5},
            extra_fields={"tool_rewards": [0.25]},
        )

    @rollout_trace_op
    async def add(self, numbers: list[int]) -> str:
        """The sum."""
        return str(sum(numbers))


class RewritingLoop(AgentLoopBase):
    """Replaces what the model wrote, and still calls it the model's."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        prompt_ids = await self.apply_chat_template(kwargs["raw_prompt"])
        await self.server_manager.generate("x", prompt_ids=prompt_ids, sampling_params=sampling_params)
        return AgentLoopOutput(
            prompt_ids=prompt_ids, response_ids=self.tokenizer.encode("mine"), response_mask=[1] * 4, metrics={}
        )


class DemandingLoop(AgentLoopBase):
    """Asks for a sampling parameter that the service lacks."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        wanted = {**sampling_params, "repetition_penalty": 1.2, "min_p": 0.1}
        await self.server_manager.generate("x", prompt_ids=[1], sampling_params=wanted)
        raise AssertionError("expected a refusal")
