r"""Codex, OpenAI's command-line agent, without a login: it answers with shell commands, so run it in a container.

    npm install -g @openai/codex@0.169.0
    export TRACKWAY_EXTERNAL__COMMAND='["python", "examples/agents/codex_cli.py"]'
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
from pathlib import Path

CONFIG = f"""
model = "policy"
model_provider = "session"
web_search = "disabled"
check_for_update_on_startup = false
analytics.enabled = false
agents.enabled = false
[model_providers.session]
name = "session"
base_url = "{os.environ["OPENAI_BASE_URL"]}"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
"""
question = "\n".join(message["content"] for message in json.load(sys.stdin)["prompt"])
with tempfile.TemporaryDirectory() as home, tempfile.TemporaryDirectory() as folder:
    Path(home, "config.toml").write_text(CONFIG)
    command = ["codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", question]
    subprocess.run(command, cwd=folder, env={**os.environ, "CODEX_HOME": home}, stdin=subprocess.DEVNULL, check=True)
