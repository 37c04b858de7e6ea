"""Reports on a run as tables: settings, decisions about the deployment, and the plan of a dry run."""

from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Group, RenderableType
from rich.table import Table

from trackway.deploy.checks.run import Checked
from trackway.deploy.config.services_for_run import Decision, RunServices
from trackway.deploy.terminal.tables import size_of, table
from trackway.run_config import RunConfig, no_effect
from trackway.run_config.compose import RECORDED, leaves
from trackway.run_config.rollout_correction import describe
from trackway.run_config.unsupported_keys import MOVED
from trackway.trainer.loop.forecast import Bounds, Forecast

_ALWAYS = frozenset(
    {
        *("data.train_files", "data.val_files", "data.train_batch_size", "data.max_prompt_length"),
        *("data.max_response_length", "actor_rollout_ref.model.path", "actor_rollout_ref.actor.optim.lr"),
        *("actor_rollout_ref.actor.ppo_mini_batch_size", "actor_rollout_ref.actor.use_kl_loss"),
        *("actor_rollout_ref.rollout.n", "actor_rollout_ref.rollout.trace.backend", "algorithm.adv_estimator"),
        *("trainer.project_name", "trainer.experiment_name", "trainer.logger", "trainer.total_epochs"),
        *("trainer.save_freq", "trainer.test_freq", "trackway.seed", "trackway.device", "trackway.dtype"),
    }
)

_OF_ROLLOUTS = frozenset(
    {
        *("data.max_prompt_length", "data.max_response_length", "actor_rollout_ref.actor.ppo_mini_batch_size"),
        *("actor_rollout_ref.actor.use_kl_loss", "actor_rollout_ref.rollout.n", "algorithm.adv_estimator"),
        "actor_rollout_ref.rollout.trace.backend",
    }
)
"""Keys of these that supervised training does not read."""


def settings_report(config: RunConfig, decisions: Sequence[Decision]) -> RenderableType:
    """Important and non-default settings, decisions about the deployment, and settings without effect."""
    notes = no_effect(config.trackway.ignored_keys)
    moved = [(key, f"read as {MOVED[key]}") for key, _ in notes if key in MOVED]
    idle = [(key, reason) for key, reason in notes if key not in MOVED]
    parts: list[RenderableType] = [_settings(config)]
    if decisions:
        rows = [(decision.key, decision.asked, decision.got, decision.reason) for decision in decisions]
        parts.append(table("deployment", ("key", "requested", "used", "reason"), rows))
    if idle:
        parts.append(table("no effect here", ("key", "reason"), idle))
    if moved:
        parts.append(table("other spellings", ("key", ""), moved))
    return Group(*parts)


def plan_report(checked: Checked, config: RunConfig, services: RunServices | None) -> RenderableType:
    """The plan of a run."""
    plan, n = checked.plan, config.actor_rollout_ref.rollout.n
    group = f"{n}" if config.group_size == n else f"({n} + 1 greedy)"
    supervised = config.is_supervised
    of_what = "rows" if supervised else "trajectories"
    lines = [
        ("rows", checked.rows),
        ("steps", _steps(plan, config)),
        *([] if supervised else [("a step", f"{plan.prompts} prompts x {group} = {plan.trajectories} trajectories")]),
        (
            "optimiser",
            f"{plan.updates} update{'s' * (plan.updates != 1)} a step, each of {plan.mini_batch} {of_what} in "
            f"{_passes(plan, config)}",
        ),
        *([("value model", _value_model(plan, config))] if plan.value_updates else []),
        *([("learner", _learner(config))] if config.placement.ranks > 1 or config.idle_gpus else []),
        ("rollout", _replicas(services)),
        *([] if checked.memory is None else checked.memory.rows),
        *([] if supervised else [("overlap", _overlap(config)), ("correction", _correction(config))]),
        ("validation", _schedule(plan.validations, plan, "never: no data.val_files")),
        ("checkpoints", _schedule(plan.checkpoints, plan, "never")),
        *([] if supervised else [("traces", _traces(plan, config))]),
    ]
    return table("plan", ("", ""), lines)


def plan_as_json(checked: Checked) -> dict[str, object]:
    """The plan and the findings as JSON."""
    findings = checked.findings
    return {
        "starts_here": findings.starts_here,
        **findings.model_dump(),
        "rows": checked.rows,
        "plan": asdict(checked.plan),
        "gpu_memory": None if checked.memory is None else asdict(checked.memory),
    }


def _passes(plan: Forecast, config: RunConfig) -> str:
    actor = config.actor_rollout_ref.actor
    if actor.use_dynamic_bsz:
        return f"passes of at most {actor.ppo_max_token_len_per_gpu} tokens"
    return f"{plan.passes} pass{'es' * (plan.passes != 1)} of at most {plan.micro_batch}"


def _value_model(plan: Forecast, config: RunConfig) -> str:
    first = config.trainer.critic_warmup
    return (
        f"{plan.value_updates} update{'s' * (plan.value_updates != 1)} a step, each of {plan.value_mini_batch} "
        f"trajectories{f'; the policy is updated from step {first} on' if first > 1 else ''}"
    )


def _overlap(config: RunConfig) -> str:
    ahead, every = config.versions_ahead, config.async_training.trigger_parameter_sync_step
    rate = config.trackway.over_sample_rate
    if not config.may_be_stale:
        return "none: rollouts and updates take turns"
    weights = f"weights are published every {every} steps, and " if every > 1 else ""
    rest = f"; a step ends when {1 - rate:.0%} of the groups in flight are complete, the others go on" if rate else ""
    most = "on average" if rate else "at most"
    return f"{weights}rollouts are {most} {ahead:g} version{'s' * (ahead != 1)} ahead of the learner{rest}"


def _correction(config: RunConfig) -> str:
    words = describe(config.correction)
    if config.correction == config.algorithm.rollout_correction.where_stale(stale=False):
        return words
    return f"{words}: set for rollouts of older weights; algorithm.rollout_correction=disabled sets none"


def _settings(config: RunConfig) -> Table:
    values = leaves(config.model_dump(mode="json"))
    defaults = leaves(RunConfig().model_dump(mode="json"))
    always = _ALWAYS - _OF_ROLLOUTS if config.is_supervised else _ALWAYS
    rows = [
        (key, shown(value), "" if value == defaults.get(key) else shown(defaults.get(key)))
        for key, value in values.items()
        if key not in RECORDED and (key in always or value != defaults.get(key))
    ]
    return table("settings", ("key", "value", "default, where it differs"), rows)


def as_yaml(config: RunConfig) -> str:
    """The resolved configuration as YAML that `--config-path` accepts."""
    import yaml

    tree = config.model_dump(mode="json")
    for key in RECORDED:
        del tree["trackway"][key.removeprefix("trackway.")]
    return "defaults: [ppo_trainer, _self_]\n" + yaml.safe_dump(tree, sort_keys=False)


def shown(value: object) -> str:
    """A value in command-line syntax."""
    if isinstance(value, list):
        return f"[{','.join(map(str, value))}]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _steps(plan: Forecast, config: RunConfig) -> str:
    if plan.total_steps is None:
        return "not known without rows"
    if plan.steps_per_epoch is None:
        return f"{plan.total_steps} in all"
    if config.trainer.val_only or config.trainer.total_training_steps is not None:
        return f"{plan.total_steps} in all; {plan.steps_per_epoch} would be one epoch"
    return f"{plan.steps_per_epoch} an epoch x {config.trainer.total_epochs} = {plan.total_steps}"


def _schedule(steps: Sequence[int], plan: Forecast, never: str) -> str:
    if plan.total_steps is None:
        return "not known without rows"
    if not steps:
        return never
    first = ", ".join(map(str, steps[:4]))
    more = f", ... {steps[-1]} ({len(steps)} in all)" if len(steps) > 4 else ""
    return f"after step{'s' * (len(steps) > 1)} {first}{more}"


def _replicas(services: RunServices | None) -> str:
    if services is None:
        return "unchanged, as deployed"
    if services.replicas is None and services.arithmetic:
        return f"engine {services.engine}, one replica; with the requested GPUs {services.arithmetic}"
    if services.replicas is None:
        return f"engine {services.engine}; replicas as in the Serve config"
    return f"engine {services.engine}; {services.replicas} replicas: {services.arithmetic}"


def _learner(config: RunConfig) -> str:
    placement, idle = config.placement, config.idle_gpus and f"; {config.idle_gpus}"
    if placement.nodes == 1:
        return f"{placement.ranks} rank{'s' * (placement.ranks > 1)} on the trainer's machine{idle}"
    return (
        f"{placement.nodes} nodes x {placement.per_node} rank{'s' * (placement.per_node > 1)}: needs "
        f"{placement.described(config.learner_needs_gpus)}{idle}"
    )


def _traces(plan: Forecast, config: RunConfig) -> str:
    backends = ", ".join(config.actor_rollout_ref.rollout.trace.backend)
    if not plan.traced:
        return "none"
    step = plan.trace_bytes.times(plan.traced)
    whole = f", {_bytes(step.times(plan.total_steps))} the whole run" if plan.total_steps else ""
    bound = config.trackway.trace_bytes_per_day
    day = f"at most {size_of(bound)} a day" if bound else "no bound a day (trackway.trace_bytes_per_day)"
    return (
        f"{plan.traced} a step to {backends or 'the services own backends'}, each {plan.spans.least} to "
        f"{plan.spans.most} spans and {_bytes(plan.trace_bytes)}: {_bytes(step)} a step{whole}; {day}"
    )


def _bytes(bounds: Bounds) -> str:
    return f"{size_of(bounds.least)} to {size_of(bounds.most)}"
