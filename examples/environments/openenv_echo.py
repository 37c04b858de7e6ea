r"""Rows for the environment that `openenv init` writes, which echoes messages and prefers long ones.

    openenv init echo_env && (cd echo_env && uv run server --port 8100) &
    export TRACKWAY_ENVIRONMENTS='{"echo": {"protocol": "openenv", "url": "http://127.0.0.1:8100", "max_open": 1}}'
    trackway up
    python examples/environments/openenv_echo.py > rows.jsonl
    trackway train --config-name tiny_demo data.train_files=$PWD/rows.jsonl data.val_files=$PWD/rows.jsonl \
        data.max_prompt_length=256
"""

import json

for index in range(64):
    row = {
        "data_source": "openenv/echo",
        "agent_name": "environment:echo",
        "prompt": [{"role": "user", "content": f"Send the environment a message of {index + 1} words."}],
        "reward_model": {"style": "rule", "ground_truth": ""},  # the environment's rewards are the score
        "extra_info": {"index": index, "env_kwargs": {"seed": index}},
    }
    print(json.dumps(row))
