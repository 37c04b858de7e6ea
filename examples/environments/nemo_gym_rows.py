r"""Rows of a NeMo-Gym resources server as rows of Trackway.

git clone https://github.com/NVIDIA-NeMo/Gym && cd Gym
ng_run "+config_paths=[resources_servers/example_session_state_mgmt/configs/example_session_state_mgmt.yaml]"
export TRACKWAY_ENVIRONMENTS='{"counter": {"protocol": "nemo_gym", "url": "http://127.0.0.1:PORT"}}' && trackway up
python examples/environments/nemo_gym_rows.py counter < .../data/example.jsonl > rows.jsonl
trackway train data.train_files=$PWD/rows.jsonl data.val_files=$PWD/rows.jsonl ...
"""

import json
import sys

name = sys.argv[1]
for index, line in enumerate(sys.stdin):
    gym_row = json.loads(line)
    question = gym_row["responses_create_params"]["input"]
    row = {
        "data_source": f"nemo_gym/{name}",
        "agent_name": f"environment:{name}",
        "prompt": [{"role": "user", "content": question}] if isinstance(question, str) else question,
        "reward_model": {"style": "rule", "ground_truth": ""},  # the server's `/verify` is the score
        "extra_info": {"index": index, "env_kwargs": gym_row},
    }
    print(json.dumps(row))
