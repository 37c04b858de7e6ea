"""Checkpoints of runs as policies of the rollout service, by names such as `demo:8`.

The weights are written by a process of its own, since loading a model takes the memory of one:

    python -m trackway.trainer.supervisor.checkpoint_policies outputs/demo 8 outputs/weights/policies/demo:8
"""

import asyncio
import contextlib
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from trackway.clients.weights import WeightStore
from trackway.trainer.run_state.export import export_checkpoint, policy_of
from trackway.trainer.run_state.folder import RunFolder
from trackway.trainer.supervisor.registry import RunRegistry
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.rollout import PolicyInfo
from trackway.wire.trainer import ENDED
from trackway.wire.weights import WeightProof, policy_url

if TYPE_CHECKING:
    from trackway.learner.policy import Policy

LOAD_S = 1800.0
"""Longest time to read a checkpoint and publish its weights."""
PROBE_LENGTH = 128
"""Tokens whose logprobs prove an adapter."""


class CheckpointPolicies:
    """Publishes checkpoints of the registry's runs below a weight store. Methods raise TrackwayError."""

    def __init__(self, registry: RunRegistry, weights_url: str) -> None:
        self._registry, self._url = registry, weights_url
        self._loads: dict[str, asyncio.Task[None]] = {}

    async def load(self, name: str) -> PolicyInfo:
        """Publish a checkpoint's weights, once. INVALID_REQUEST for a name without a step, NOT_FOUND for no run."""
        run, _, step = name.partition(":")
        if not step:
            message = f"expected a run and a step of its checkpoints, as {name}:8, got {name!r}; add the step"
            raise TrackwayError(ErrorCode.INVALID_REQUEST, message)
        folder, store = self._registry.existing(run), WeightStore(policy_url(self._url, name))
        latest = await asyncio.to_thread(store.latest)
        if latest is None or latest.run != _owner(folder, step):
            load = self._loads.get(name) or self._begin(name, folder, step, store.url)
            await asyncio.shield(load)
            latest = await asyncio.to_thread(store.latest)
        return PolicyInfo(name=name, version=latest and latest.version)

    async def drop(self, name: str) -> PolicyInfo:
        """Remove a policy's weights. NOT_FOUND without any, CONFLICT while a run trains it."""
        for info in self._registry.list():
            if info.policy == name and info.state not in ENDED:
                message = f"expected a policy that no run trains, got {name!r}, which run {info.run!r} does; stop it"
                raise TrackwayError(ErrorCode.CONFLICT, message, run=info.run)
        store = WeightStore(self._url)
        published = await asyncio.to_thread(store.policies)
        if name not in published:
            names = ", ".join(published) or "none"
            raise TrackwayError(
                ErrorCode.NOT_FOUND, f"expected a policy with weights ({names}), got {name!r}; name one"
            )
        await asyncio.to_thread(store.remove_policy, name)
        return PolicyInfo(name=name)

    def _begin(self, name: str, folder: RunFolder, step: str, url: str) -> asyncio.Task[None]:
        task = self._loads[name] = asyncio.create_task(_published(folder, step, url), name=f"policy {name}")
        task.add_done_callback(lambda _: self._loads.pop(name))
        return task


async def _published(folder: RunFolder, step: str, url: str) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", __name__, str(folder.path), step, url),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(LOAD_S):
            refused, log = await process.communicate()
    except TimeoutError:
        message = f"expected checkpoint {step} of run {folder.name} within {LOAD_S:.0f} s, got none; try again"
        raise TrackwayError(ErrorCode.DEADLINE_EXCEEDED, message, run=folder.name) from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    if refused:
        raise TrackwayError(ErrorCode.INVALID_REQUEST, refused.decode(errors="replace"), run=folder.name)
    if process.returncode:
        last = log.decode(errors="replace").strip().rpartition("\n")[2][:500]
        message = f"expected checkpoint {step} of run {folder.name} to load, got {last}; try again"
        raise TrackwayError(ErrorCode.INTERNAL, message, run=folder.name)


def publish_checkpoint(folder: RunFolder, step: int, url: str) -> None:
    """Publish a checkpoint's weights in a store, in place of what is there. Raises TrackwayError.

    A run that published adapters has its adapter published, and any other its whole weights.
    """
    store, model = WeightStore(url), folder.config().actor_rollout_ref.model
    is_adapter = model.lora_rank > 0 and not model.lora.merge
    with tempfile.TemporaryDirectory(prefix="trackway-policy-") as scratch:
        exported = Path(scratch) / "model"
        checkpoint = export_checkpoint(folder, exported, step, merge=not is_adapter).checkpoint
        proof = _adapter_proof(policy_of(Path(checkpoint) / "actor", model)) if is_adapter else _whole_proof(exported)
        latest = store.latest()
        store.publish(latest.version + 1 if latest else max(step, 1), _owner(folder, str(step)), exported, proof)
        store.prune(1)


def _whole_proof(folder: Path) -> WeightProof:
    from trackway.learner.weight_proof import tensor_digests

    digests = tensor_digests(folder)
    return WeightProof(digests=digests, dtype=digests[0].dtype)


def _adapter_proof(policy: "Policy") -> WeightProof:
    """Logprobs of fixed tokens with the adapter, and without it as the version before."""
    import torch

    from trackway.learner.weight_proof import ScoredSequence, probes_of, rounding_of

    vocabulary = min(256, policy.model.config.get_text_config().vocab_size)
    token_ids = [(37 * i + 11) % vocabulary for i in range(PROBE_LENGTH)]
    base = ScoredSequence(token_ids, policy.base_logprobs(token_ids))
    probes = probes_of(policy.published_logprobs([token_ids]), [base])
    return WeightProof(
        probes=probes,
        previous_version=0,
        dtype=str(policy.published_dtype).removeprefix("torch."),
        rounding=rounding_of(probes, policy.published_logprobs([token_ids], torch.bfloat16)),
    )


def _owner(folder: RunFolder, step: str) -> str:
    """The name of whose weights they are. A run that is begun again under its name has another `uid`."""
    return f"{folder.name}:{step} ({folder.info().uid[:8]})"


def main() -> None:
    """Publish, or print why a checkpoint is refused."""
    path, step, url = sys.argv[1:]
    try:
        publish_checkpoint(RunFolder(Path(path)), int(step), url)
    except TrackwayError as error:
        print(error.message, end="")


if __name__ == "__main__":
    main()
