r"""opencode, a command-line agent, without a login: it answers with shell commands, so run it in a container.

    npm install -g opencode-ai@1.18.33
    export TRACKWAY_EXTERNAL__COMMAND='["python", "examples/agents/opencode_cli.py"]'
    MODEL=$HOME/models/Qwen2.5-3B-Instruct
    trackway up --model-path $MODEL && trackway data make-tiny rows --agent-name external
    trackway train --config-name grpo actor_rollout_ref.model.path=$MODEL data.max_prompt_length=32768 \
        data.train_files=$PWD/rows/train.parquet data.val_files=$PWD/rows/test.parquet \
        data.train_batch_size=64 actor_rollout_ref.actor.ppo_mini_batch_size=64
"""

import json
import os
import subprocess
import sys
import tempfile

PROVIDER = {
    "npm": "@ai-sdk/openai-compatible",
    "options": {"baseURL": os.environ["OPENAI_BASE_URL"], "apiKey": os.environ["OPENAI_API_KEY"]},
    "models": {"policy": {"limit": {"context": 65536, "output": 4096}}},
}
CONFIG = {"provider": {"session": PROVIDER}, "share": "disabled", "autoupdate": False, "permission": "allow"}
question = "\n".join(message["content"] for message in json.load(sys.stdin)["prompt"])
with tempfile.TemporaryDirectory() as folder:
    homes = {f"XDG_{kind}_HOME": f"{folder}/{kind}" for kind in ("CONFIG", "DATA", "STATE")}
    variables = {**os.environ, **homes, "OPENCODE_CONFIG_CONTENT": json.dumps(CONFIG)}
    options = ["--pure", "--dir", folder, "--title", "rollout", "--model", "session/policy"]
    command = ["opencode", "run", *options, question]
    subprocess.run(command, cwd=folder, env=variables, stdin=subprocess.DEVNULL, check=True)
