"""The fit loops: multi-turn GRPO over services, in the order of the paper (arXiv:2402.03300, algorithm 1), and
supervised training.
"""

from trackway.trainer.loop.base import StopRequested
from trackway.trainer.loop.supervised import SupervisedTraining
from trackway.trainer.loop.training import Training
from trackway.wire.trainer import RunState


async def fit(run: Training | SupervisedTraining) -> RunState:
    """Train until the last step or until a stop is requested. Either way the newest step is saved."""
    return await (fit_rows(run) if isinstance(run, SupervisedTraining) else fit_rollouts(run))


async def fit_rows(run: SupervisedTraining) -> RunState:
    """Train on rows with given answers.

    For each step: draw rows and move the policy towards their answers.
    """
    try:
        if run.first_validation_is_due:
            await run.log(await run.validate(run.progress.unvalidated))
        while not run.finished:
            with run.one_step():
                metrics = await run.update()
                if run.validation_is_due:
                    metrics = await run.validate(metrics)
                if run.checkpoint_is_due:
                    await run.save(metrics)
            await run.log(metrics)
    except StopRequested:
        pass  # a resumed run begins the validation again
    finally:
        await run.close()
    await run.save()
    await run.saved()
    return RunState.FINISHED if run.validated and run.complete else RunState.STOPPED


async def fit_rollouts(run: Training) -> RunState:
    """Train on rollouts until the last step or until a stop is requested. Either way the newest step is saved.

    For each step: draw prompts, let the agents roll each one out n times under the newest weights, compare each rollout
    with its group, move the policy, and publish it. Engines on the learner's GPUs sleep while it computes. With
    `async_training.staleness_threshold` rollouts of later steps, and validations, go on meanwhile.
    """
    try:
        await run.resume_validation()
        version = await run.publish()
        await run.wake_up(version)  # they sleep while the learner is built
        if run.first_validation_is_due:
            with run.traces.step(run.step):
                metrics = await run.validate(version, run.progress.unvalidated)
            await run.log(metrics)
        while not run.finished:
            with run.one_step():
                trajectories = await run.rollout(version)
                await run.sleep()
                metrics = await run.update(trajectories, version)
                if run.publish_is_due:
                    version = await run.publish(metrics)
                await run.wake_up(version, metrics)
                if run.validation_is_due:
                    metrics = await run.validate(version, metrics)
                if run.checkpoint_is_due:
                    await run.save(metrics)
            await run.log(metrics)
        await run.complete_validation()
    except StopRequested:
        pass  # a resumed run requests the unfinished rollouts again
    finally:
        await run.close()
    await run.save()
    await run.saved()
    return RunState.FINISHED if run.validated and run.complete else RunState.STOPPED
