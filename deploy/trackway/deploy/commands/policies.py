"""`trackway policies list | load | drop`: the policies of running services."""

from typing import Annotated

import typer

from trackway.deploy.commands.options import OUTPUTS, Outputs, json_of
from trackway.deploy.terminal.progress import print_json, stdout

app = typer.Typer(no_args_is_help=True)

PolicyArgument = Annotated[str, typer.Argument(metavar="POLICY", help="A run and a step of its checkpoints: demo:8.")]
_LOAD_S = 1800.0


@app.command("list")
def list_policies(
    outputs: Outputs = OUTPUTS, as_json: Annotated[bool, json_of("the policies and their versions")] = False
) -> None:
    """List the policies that a request can name by its field `model`.  Example: trackway policies list"""
    from trackway.clients import RolloutClient, run
    from trackway.deploy.deployment.record import load_running
    from trackway.deploy.terminal.tables import table, wide

    policies = run(RolloutClient(load_running(outputs).url("rollout")).policies()).policies
    if as_json:
        print_json([policy.model_dump(mode="json") for policy in policies])
        return
    rows = [
        (
            policy.name,
            "default" if policy.is_default else "",
            "loaded" if policy.loaded else "",
            "" if policy.version is None else str(policy.version),
        )
        for policy in policies
    ]
    wide(stdout).print(table("", ("policy", "", "in memory", "version"), rows))


@app.command()
def load(
    policy: PolicyArgument,
    outputs: Outputs = OUTPUTS,
    as_json: Annotated[bool, json_of("the policy and its version")] = False,
) -> None:
    """Make a checkpoint a policy of the rollout service, beside a training.  Example: trackway policies load demo:8

    Requests then name it by `model`. The first one loads it into memory.
    """
    from trackway.clients import Deadline, TrainerClient, run
    from trackway.deploy.deployment.record import load_running
    from trackway.deploy.terminal.progress import board

    trainer = TrainerClient(load_running(outputs).url("trainer"))
    with board(as_json) as shown:
        shown.report(f"checkpoint {policy}", "loading")
        loaded = run(trainer.load_policy(policy, Deadline.after(_LOAD_S)))
        shown.report(f"checkpoint {policy}", "ready")
    if as_json:
        print_json(loaded)
        return
    stdout.print(f"policy {policy} is served; try it: trackway try rows.jsonl --policy {policy} --outputs {outputs}")


@app.command()
def drop(
    policy: PolicyArgument,
    outputs: Outputs = OUTPUTS,
    as_json: Annotated[bool, json_of("the policy's name")] = False,
) -> None:
    """Remove a policy's weights from the weight store; checkpoints stay.  Example: trackway policies drop demo:8"""
    from trackway.clients import TrainerClient, run
    from trackway.deploy.deployment.record import load_running

    dropped = run(TrainerClient(load_running(outputs).url("trainer")).drop_policy(policy))
    if as_json:
        print_json(dropped)
        return
    stdout.print(f"policy {policy} is no longer served")
