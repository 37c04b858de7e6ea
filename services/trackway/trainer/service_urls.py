"""The services that a run's process uses."""

from pydantic import BaseModel


class ServiceUrls(BaseModel):
    """URLs of the services that a run's process uses. `services.json` in the run's folder."""

    agent_url: str
    """Agent service."""
    tools_url: str
    """Tool server, the source of the tool schemas for filtering overlong prompts."""
    weights_url: str
    """Weight store that the rollout replicas pull from."""
    rollout_url: str | None = None
    """Rollout service, queried for its span counts."""
    reward_url: str | None = None
    """Reward service, queried for its span counts and its scorers."""
    direct: bool = True
    """Call the agent service's replicas directly where they are reachable."""

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
