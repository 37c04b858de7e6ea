"""Settings of the trainer service: where runs live, and how long a learner may take to stop."""

from pydantic import BaseModel, Field

from trackway.serving import ServiceSettings


class ServiceUrls(BaseModel):
    """What a run's own process is told about the services around it; `services.json` in the run's folder."""

    agent_url: str
    """Agent service."""
    tools_url: str
    """Tool server, asked for the tools' schemas when overlong prompts are filtered."""
    weights_url: str
    """Weight store that the rollout replicas pull from."""


class TrainerSettings(ServiceSettings):
    """Settings of the trainer service."""

    outputs_dir: str = "outputs"
    """Folder of the runs: one folder each."""
    weights_url: str = "outputs/weights"
    """fsspec URL of the weight store, shared with the rollout replicas."""
    stop_deadline_s: float = Field(default=120.0, gt=0)
    """Seconds that a learner gets to finish its step and save before it is killed."""

    def service_urls(self) -> ServiceUrls:
        """What is handed to a run's process."""
        return ServiceUrls(agent_url=self.url("agent"), tools_url=self.url("tools"), weights_url=self.weights_url)
