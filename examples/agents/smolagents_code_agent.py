# /// script
# requires-python = ">=3.11"
# dependencies = ["smolagents[openai]==1.26.0"]
# ///
r"""A CodeAgent of smolagents, which writes Python and answers with its function final_answer.

    export TRACKWAY_EXTERNAL__COMMAND='["uv", "run", "examples/agents/smolagents_code_agent.py"]' && trackway up
    trackway train ... actor_rollout_ref.rollout.agent.default_agent_loop=external \
        data.max_prompt_length=16384 actor_rollout_ref.rollout.multi_turn.enable=false
"""

import json
import os
import sys

from smolagents import CodeAgent, OpenAIModel

model = OpenAIModel("policy", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
question = "\n".join(message["content"] for message in json.load(sys.stdin)["prompt"])
print(CodeAgent(tools=[], model=model, max_steps=4).run(question))
