"""The services that a run's process uses."""

from pydantic import BaseModel

from trackway.wire.weights import policy_url


class ServiceUrls(BaseModel):
    """URLs of the services that a run's process uses. `services.json` in the run's folder."""

    agent_url: str
    """Agent service."""
    tools_url: str
    """Tool server, the source of the tool schemas for filtering overlong prompts."""
    weights_url: str
    """Weight store that the rollout replicas pull from."""
    policy: str | None = None
    """Policy of the rollout service whose weights are in this store. None is its default one."""
    rollout_url: str | None = None
    """Rollout service, queried for its span counts."""
    reward_url: str | None = None
    """Reward service, queried for its span counts and its scorers."""
    direct: bool = True
    """Call the agent service's replicas directly where they are reachable."""

    def with_policy(self, name: str | None) -> "ServiceUrls":
        """These services, with the weight store of a policy; None for the default one."""
        if name is None:
            return self
        return self.model_copy(update={"policy": name, "weights_url": policy_url(self.weights_url, name)})

    @property
    def traced(self) -> dict[str, str]:
        """URLs of the services that record spans, by name."""
        urls = {
            "agent": self.agent_url,
            "rollout": self.rollout_url,
            "tools": self.tools_url,
            "reward": self.reward_url,
        }
        return {name: url for name, url in urls.items() if url is not None}
