"""The fit loop: multi-turn GRPO over services, in the order of the paper (arXiv:2402.03300, algorithm 1)."""

from trackway.trainer.training import StopRequested, Training
from trackway.wire.trainer import RunState


async def fit(run: Training) -> RunState:
    """Train until the last step or until a stop is requested; either way the newest step is saved.

    For each step: draw prompts, let the agents roll each one out n times under the newest weights, compare each rollout
    with its group, move the policy, and publish it.
    """
    version = await run.publish()
    if run.step == 0 and run.plan.val_before_train:
        with run.traces.step(0):
            metrics = await run.validate(version)
        await run.log(metrics)
    try:
        while not run.finished:
            with run.one_step():
                batch = run.next_batch()
                trajectories = await run.rollout(batch, version)
                metrics = await run.update(trajectories, version)
                version = await run.publish()
                if run.validation_is_due:
                    metrics |= await run.validate(version)
                if run.checkpoint_is_due:
                    await run.save(metrics)
            await run.log(metrics)
    except StopRequested:
        pass  # the step's rollouts are abandoned; a resumed run draws the same prompts again
    await run.save()
    return RunState.FINISHED if run.complete else RunState.STOPPED
