"""Who calls a tool server while its replicas come and go: whole trajectories, and sessions with state."""

import asyncio
import threading
from typing import Any

from benchmarks.sim_engine import SIM
from transformers import AutoTokenizer

from tests.serving import served
from tests.waiting import until
from trackway.agent.app import create_app as create_agent
from trackway.agent.settings import AgentSettings
from trackway.clients import AgentClient, CallPolicy, Deadline, ToolsClient, run
from trackway.deploy.bundled import TINY_MODEL
from trackway.deploy.deployment.record import Deployment
from trackway.rollout.app import create_app as create_rollout
from trackway.rollout.settings import RolloutSettings
from trackway.trainer.data.tiny import make_tiny_rows
from trackway.wire.agent import GroupRequest, Sample
from trackway.wire.errors import TrackwayError
from trackway.wire.rollout import SamplingParams
from trackway.wire.service import ReplicaInfo
from trackway.wire.tools import ExecuteRequest
from trackway.wire.trajectory import Trajectory

MODEL = TINY_MODEL
TOOL = "calc_gsm8k_reward"
CALLS, STEP_S = 4, 0.02
GROUPS, GROUP = 6, 8
RIGHT = ExecuteRequest(arguments={"answer": "72"})


class Trajectories:
    """Groups of an agent that calls its tool over and over, beside the test; `end` does not wait for ever."""

    def __init__(self, deployment: Deployment) -> None:
        self.made: list[Trajectory] = []
        self._base_url = deployment.base_url
        self._thread = threading.Thread(target=lambda: run(self._all()))
        self._thread.start()

    def end(self) -> list[Trajectory]:
        self._thread.join(100)
        assert not self._thread.is_alive(), f"{len(self.made)} of {GROUPS * GROUP} trajectories ended"
        return self.made

    async def _all(self) -> None:
        rollout = create_rollout(
            RolloutSettings.model_validate({"engine": SIM, "model_path": MODEL, "engine_options": sim()})
        )
        async with served(rollout) as engine:
            at = {"base_url": self._base_url, "rollout_url": engine}
            async with served(create_agent(AgentSettings.model_validate({"model_path": str(MODEL), **at}))) as agent:
                client = AgentClient(agent, policy=CallPolicy(total_s=90.0, read_s=90.0))
                await asyncio.gather(*(self._group(client, number, row) for number, row in enumerate(rows())))

    async def _group(self, client: AgentClient, number: int, row: Sample) -> None:
        request = GroupRequest(
            run="killed",
            experiment_name="killed",
            step=number,
            sample=row,
            n=GROUP,
            sampling_params=SamplingParams(max_tokens=256),
            tools=[TOOL],
        )
        async for trajectory in client.group(request, Deadline.after(90.0)):
            self.made.append(trajectory)


def sim() -> dict[str, Any]:
    """An engine that calls the tool a few times with the right answer, and then says it: some seconds in all."""
    call = f'<tool_call>\n{{"name": "{TOOL}", "arguments": {{"answer": "72"}}}}\n</tool_call><|im_end|>'
    turns = [*[call] * CALLS, "#### 72<|im_end|>"]
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    written = [tokenizer.encode(turn, add_special_tokens=False) for turn in turns]
    return {"script": written, "step_s": STEP_S, "step_slope_s": 0.0}


def rows() -> list[Sample]:
    kwargs = {TOOL: {"create_kwargs": {"ground_truth": "72"}}}
    change = {"agent_name": "tool_agent", "extra_info": {"tools_kwargs": kwargs}}
    return [row.model_copy(update=change) for row in make_tiny_rows("train", GROUPS, seed=1)]


class Sessions:
    """Instances that are called over and over until the end, each of its own session."""

    def __init__(self, deployment: Deployment, count: int) -> None:
        self.homes: dict[str, str] = {}
        self.ended: dict[str, str] = {}
        """What became of each: its reward, or the code of an error."""
        self.calls = 0
        self._url, self._count, self._over = f"{deployment.base_url}/tools", count, threading.Event()
        self._thread = threading.Thread(target=lambda: run(self._all()))
        self._thread.start()
        until(lambda: len(self.homes) == count)

    def end(self) -> None:
        self._over.set()
        self._thread.join(60)
        assert not self._thread.is_alive()

    def ends(self, replica: ReplicaInfo) -> set[str]:
        """Of those on one replica."""
        return {self.ended[name] for name, home in self.homes.items() if home == replica.health.replica}

    async def _all(self) -> None:
        client = ToolsClient(self._url, direct=True)
        await asyncio.gather(*(self._one(client, f"session {number}") for number in range(self._count)))

    async def _one(self, client: ToolsClient, name: str) -> None:
        made = await client.create(TOOL, name, {"ground_truth": "72"})
        self.homes[name] = made.instance_id.partition("-")[0]
        try:
            await client.execute(made.instance_id, RIGHT, name)
            while not self._over.is_set():
                result = await client.execute(made.instance_id, RIGHT, name)
                assert result.reward == -0.05  # as it is no better than the answer before, which is state
                self.calls += 1
                await asyncio.sleep(0.1)
            self.ended[name] = str(await client.reward(made.instance_id, name))
            await client.release(made.instance_id, name)
        except TrackwayError as error:
            self.ended[name] = error.code
