"""Serves a part of NeMo-Gym 0.4.0 as it is, at a port: its `example_session_state_mgmt`, or its `simple_agent`.

    python nemo_gym_program.py counter PORT
    python nemo_gym_program.py simple_agent PORT RESOURCES_PORT MODEL_PORT

Its own command would start Ray and a head server around them.
"""

import json
import os
import sys

import uvicorn
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.global_config import NEMO_GYM_CONFIG_DICT_ENV_VAR_NAME, get_global_config_dict
from nemo_gym.server_utils import ServerClient
from resources_servers.example_session_state_mgmt import app as counter
from responses_api_agents.simple_agent import app as simple_agent

part, *ports = sys.argv[1:]
own, *others = [{"host": "127.0.0.1", "port": int(port)} for port in ports]
described = {**own, "entrypoint": "app.py", "name": part}
kinds = {"tools": "resources_servers", "model": "responses_api_models"}
addresses = {name: {kinds[name]: {name: address}} for name, address in zip(kinds, others, strict=False)}
addresses[part] = {"responses_api_agents": {part: own}}
os.environ[NEMO_GYM_CONFIG_DICT_ENV_VAR_NAME] = json.dumps(addresses)
client = ServerClient(head_server_config=BaseServerConfig(**own), global_config_dict=get_global_config_dict())
if part == "counter":
    settings = counter.StatefulCounterResourcesServerConfig(**described)
    server = counter.StatefulCounterResourcesServer(config=settings, server_client=client)
else:
    tools, model = ({"type": kind, "name": name} for name, kind in kinds.items())
    settings = simple_agent.SimpleAgentConfig(**described, resources_server=tools, model_server=model)
    server = simple_agent.SimpleAgent(config=settings, server_client=client)
uvicorn.run(server.setup_webserver(), **own)
