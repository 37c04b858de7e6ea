"""`trackway evaluate` shows how often a model solves rows, and `trackway try` the trajectories of one row."""

from pathlib import Path
from typing import Annotated

import typer

from trackway.deploy.commands.options import OUTPUTS, ConfigName, Outputs, json_of, up_settings
from trackway.deploy.terminal.progress import board, print_json, stderr, stdout

app = typer.Typer()


@app.command()
def evaluate(
    what: Annotated[
        str | None,
        typer.Argument(
            help="A run, a checkpoint, a model's folder or Hub id, `running`, a URL, or an evaluation to show."
        ),
    ] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="verl's keys in Hydra's grammar: key=value.")] = None,
    data: Annotated[Path | None, typer.Option(help="File of rows; default data.val_files.")] = None,
    n: Annotated[int, typer.Option("--n", min=1, max=1024, help="Rollouts of each row.")] = 1,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first rows.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0, help="Default: as in training; 0 is greedy.")] = None,
    seed: Annotated[
        int | None, typer.Option(help="The same seed samples the same tokens; default trackway.seed.")
    ] = None,
    pass_above: Annotated[float, typer.Option(help="A rollout passes with a score over it.")] = 0.0,
    step: Annotated[int | None, typer.Option(min=0, help="Step of the run's checkpoint; default the newest.")] = None,
    model: Annotated[str | None, typer.Option(help="Name of the model at a URL; default its only one.")] = None,
    api_key_env: Annotated[
        str | None, typer.Option(metavar="NAME", help="Environment variable with the API key for a URL.")
    ] = None,
    no_seed: Annotated[bool, typer.Option("--no-seed", help="Send a URL no seed, which some servers refuse.")] = False,
    policy: Annotated[
        str | None, typer.Option(help="With `running`: a policy, as `trackway policies list` shows it.")
    ] = None,
    run: Annotated[str | None, typer.Option(metavar="RUN", help="Name of the evaluation.")] = None,
    resume: Annotated[str | None, typer.Option(metavar="RUN", help="Continue an evaluation that was cut off.")] = None,
    rescore: Annotated[
        str | None, typer.Option(metavar="RUN", help="Score the rollouts of an evaluation again, without a model.")
    ] = None,
    against: Annotated[str | None, typer.Option(metavar="RUN", help="Compare with another evaluation.")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file, or the folder that has --config-name.")] = None,
    config_name: ConfigName = "default",
    outputs: Outputs = OUTPUTS,
    as_json: Annotated[bool, json_of("the evaluation and its comparison")] = False,
) -> None:
    """Roll out each row of a dataset and report pass@k, scores, lengths and tool use.

    A run is evaluated with its own settings and val_files. An SFT run has no reward, so its settings come from --config
    and the command line. Without running services it starts what it needs in this process, in seconds and without Ray.
    Ctrl-C keeps what has ended; --resume continues. The result is a run in the outputs folder, so the console shows its
    rollouts. Exit status 1 if a rollout failed.

    A URL is any server with OpenAI's chat completions, https://host/v1. It needs no rollout service.

    Example: trackway evaluate tiny-demo --data test.jsonl --n 4
    """
    from trackway.deploy.runs.evaluation_report import evaluation_report
    from trackway.evaluation.store import EvaluationStore
    from trackway.system.process import UserError

    words = [*(overrides or []), *([] if seed is None else [f"trackway.seed={seed}"])]
    if what is not None and "=" in what and (resume or rescore):  # an override, since nothing else is named
        words, what = [what, *words], None
    if sum(name is not None for name in (what, resume, rescore)) != 1:
        raise UserError(
            "expected one of WHAT, --resume RUN and --rescore RUN; for example: trackway evaluate tiny-demo"
        )

    def store_of(name: str) -> EvaluationStore:
        return EvaluationStore.find(outputs, name)

    if against:
        store_of(against).evaluation()  # refuse an unknown name before the rollouts
    if what and store_of(what).finished:
        evaluation = store_of(what).evaluation()
    elif rescore:
        from trackway.deploy.runs import evaluate as evaluations

        with board(as_json) as shown:
            evaluation = evaluations.rescored(rescore, words, run, outputs, shown.report)
    else:
        from trackway.deploy.runs import evaluate as evaluations
        from trackway.deploy.runs.shown import evaluated

        options = evaluations.Options(
            data, n, limit, temperature, pass_above, step, run, model, api_key_env, no_seed, policy
        )
        prepared = (
            evaluations.resumed(resume, outputs)
            if resume
            else evaluations.prepare(what or "", options, words, config, config_name, outputs)
        )
        try:
            evaluation = evaluated(prepared, as_json)
        except BaseException:
            if prepared.store.exists:
                again = f"trackway evaluate --resume {prepared.evaluation.name}"
                stderr.print(f"its rollouts are kept; continue with: {again}", soft_wrap=True)
            raise
    store = store_of(evaluation.name)
    compared = store.compared(store_of(against)) if against else None
    if as_json:
        print_json({"evaluation": evaluation, "against": against, "compared": compared})
    else:
        stdout.print(evaluation_report(evaluation, store.tasks, against, compared))
    if evaluation.summary is None or evaluation.summary.failed:
        raise typer.Exit(1)


@app.command("try")
def try_row(
    rows: Annotated[Path | None, typer.Argument(help="File of rows; default data.train_files.")] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="verl's keys in Hydra's grammar: key=value.")] = None,
    row: Annotated[int, typer.Option(min=1, help="Number of the row; the first is 1.")] = 1,
    n: Annotated[int, typer.Option("--n", min=1, max=1024, help="Rollouts; several are shown with advantages.")] = 1,
    config: Annotated[Path | None, typer.Option(help="YAML file, or the folder that has --config-name.")] = None,
    config_name: ConfigName = "default",
    policy: Annotated[
        str | None, typer.Option(help="Policy of the running services, as `trackway policies list` shows it.")
    ] = None,
    outputs: Outputs = OUTPUTS,
    as_json: Annotated[bool, json_of("the row, its trajectories and their advantages")] = False,
) -> None:
    """Run one row before any training: its turns, tool calls, reward, tokens and seconds.

    Uses the running services of the outputs folder. Without any, it starts what it needs in this process, in seconds
    and without Ray. Rows, tools, scorer and agent loop are checked first, as by `trackway train --preflight`. Exit
    status 1 if a trajectory failed. The same command samples the same tokens; trackway.seed=7 samples others.

    Example: trackway try rows.jsonl --row 3 --n 8
    """
    from trackway.deploy.runs.prepare import prepare
    from trackway.deploy.runs.trial import Trial, trial_report
    from trackway.deploy.terminal.tables import wide

    words = [*(overrides or [])]
    if rows is not None and "=" in str(rows) and not rows.exists():  # an override, as no rows were given
        words, rows = [str(rows), *words], None
    trial = Trial(prepare(words, config, config_name, up_settings(outputs=outputs), trial=True), rows, policy)
    with board(as_json) as shown:
        findings, usable = trial.check(shown.report)
        findings.refuse()
        assert usable is not None
        tried = trial.run(usable, row, n, shown.report)
    if as_json:
        print_json(tried)
    else:
        for reason in (*findings.not_checked, *findings.replaced_here):
            stderr.print(f"[yellow]note:[/] {reason}", soft_wrap=True)
        wide(stdout).print(trial_report(tried, trial.subject.config.data.max_response_length))
    if any(trajectory.error for trajectory in tried.trajectories):
        raise typer.Exit(1)
