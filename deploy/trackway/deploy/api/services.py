"""Services for training and evaluation from Python: `local`, `connect`, and the calls that start what they need."""

import copy
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pydantic import SecretStr

from trackway.clients.http_client import using_token
from trackway.deploy.api.given import ROWS, Function, Functions, RowsGiven, overrides, row_files
from trackway.deploy.api.run import Evaluated, Run
from trackway.deploy.checks.run import check_run
from trackway.deploy.config import serve_config
from trackway.deploy.deployment.attach import attach
from trackway.deploy.deployment.record import Deployment, recorded
from trackway.deploy.local.reload import reload
from trackway.deploy.local.settings import UpSettings
from trackway.deploy.runs import evaluate as evaluations
from trackway.deploy.runs import shown
from trackway.deploy.runs.demo import demo_words, write_rows
from trackway.deploy.runs.prepare import prepare
from trackway.deploy.runs.session import RunSession
from trackway.deploy.terminal.progress import board
from trackway.system.process import UserError
from trackway.wire.base import checked_run_name, functions_file_of

if TYPE_CHECKING:
    import pandas

_FUNCTIONS = ("tools", "reward")
_DEMO = "tiny_demo"
_SEED = 0


class Services:
    """The services of an outputs folder. As a context manager, it stops at its end those that it started."""

    def __init__(self, outputs: Path, token: SecretStr | None = None) -> None:
        self.outputs = outputs
        self._token = token
        self._started = ExitStack()

    @property
    def deployment(self) -> Deployment | None:
        """The running services and their addresses, or None until the first run starts them."""
        return recorded(self.outputs)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the services that this object started, once backends have their last spans."""
        with self.authorised():
            self._started.close()

    def train(
        self,
        rows: RowsGiven | None = None,
        *,
        model: str | Path | None = None,
        tools: Sequence[Function] = (),
        reward: Function | None = None,
        held_out: RowsGiven | None = None,
        run: str | None = None,
        config: str | Path = "default",
        **keys: Any,
    ) -> Run:
        """Start a run and return it. `Run.wait` follows it. The services start if they do not run.

        rows: files, or rows: dicts with `prompt` and `answer`, or with verl's columns; a DataFrame; a Hugging Face
            dataset. By default the configuration's `data.train_files`, and with `tiny_demo` the demo's rows.
        model: a folder or a Hugging Face id; by default the tiny model that Trackway brings.
        tools: typed functions of this process, as with `@function_tool`. They are served while this process runs.
        reward: a scoring function with verl's signature. It may be async.
        held_out: rows to validate on.
        run: the run's name. An unfinished run of that name is resumed.
        config: a preset, such as `tiny_demo`, or a YAML file.
        keys: verl's keys by section, `trainer={"total_training_steps": 10}`.

        Raises UserError and TrackwayError for what prevents the start, all at once.
        """
        name = checked_run_name(run) if run else self._free_name()
        given = {"data.train_files": rows, "data.val_files": held_out}
        files = {key: self._files(value) for key, value in given.items() if value is not None}
        path = {} if model is None else {"actor_rollout_ref.model.path": str(model)}
        words = overrides({**path, **keys}) + overrides({**files, "trainer.experiment_name": name})
        if rows is None and config == _DEMO:
            words = self._demo(words)
        with self.authorised(), self._functions(name, tools, reward, self.deployment) as (served, stack):
            subject = prepare([*words, *served], *_config(config), UpSettings.read(outputs=self.outputs))
            with board(False) as parts:
                checked = check_run(subject, True, parts.report)
            checked.findings.refuse()
            session = self._started.enter_context(shown.opened(subject))
            info = session.submit(subject, lambda info: None)
            return Run(self, session, info, stack.pop_all(), tools, reward)

    def evaluate(
        self,
        what: Run | str | Path,
        rows: RowsGiven | None = None,
        *,
        n: int = 1,
        limit: int | None = None,
        temperature: float | None = None,
        pass_above: float = 0.0,
        step: int | None = None,
        run: str | None = None,
        model: str | None = None,
        api_key_env: str | None = None,
        tools: Sequence[Function] = (),
        reward: Function | None = None,
        config: str | Path = "default",
        **keys: Any,
    ) -> Evaluated:
        """Roll out each row n times and summarise the scores.

        what: a run or its name, a checkpoint, a model's folder or Hugging Face id, `running`, or the URL of a server
            with OpenAI's chat completions, whose model and key's environment variable are `model` and `api_key_env`.
        rows: by default the run's held-out rows.
        limit: take the first rows only.
        temperature: 0 is greedy; by default as in training.
        pass_above: a rollout passes with a score over it.
        step: the step of the run's checkpoint, by default the newest. 0 is the model that the run started from.
        run: the name of the evaluation.
        tools, reward: by default those that the run was started with, if this process started it.
        For the other parameters, see `train`. Raises UserError and TrackwayError as it does.
        """
        if isinstance(what, Run):
            tools, reward = tools or what.tools, reward or what.reward
        target = what.name if isinstance(what, Run) else str(what)
        name = run or f"evaluation-of-{Path(target).name}"
        running = self.deployment if target == evaluations.RUNNING else None  # else services start in this process
        with self.authorised(), self._functions(name, tools, reward, running) as (served, _):
            options = evaluations.Options(None, n, limit, temperature, pass_above, step, run, model, api_key_env)
            words = [*overrides(keys), *served]
            if rows is not None:
                words += overrides({"data": {"val_files": row_files(rows, self.outputs)}})
            evaluation = evaluations.prepare(target, options, words, *_config(config), self.outputs)
            shown.evaluated(evaluation)
            return Evaluated(evaluation.store)

    def rollout(self, what: Run | str | Path, rows: RowsGiven, **options: Any) -> "pandas.DataFrame":
        """Roll out each row, and return the trajectories. For the parameters, see `evaluate`."""
        return self.evaluate(what, rows, **options).trajectories()

    @contextmanager
    def authorised(self) -> Generator[None]:
        """Send this object's token in the calls of a block."""
        with using_token(self._token):
            yield

    def _files(self, rows: RowsGiven) -> list[str]:
        """The files of rows for a run. Raises UserError for rows that are not files when services run elsewhere."""
        files = row_files(rows, self.outputs)
        if Path(files[0]).parent == self._rows_folder:
            self._check_rows_here()
        return files

    def _demo(self, words: list[str]) -> list[str]:
        """Return the demo's overrides and then these. Write the demo's rows unless the overrides name others."""
        self._check_rows_here()
        write_rows(_SEED, self._rows_folder, words)
        return demo_words(_SEED, _DEMO, self._rows_folder, words)

    @property
    def _rows_folder(self) -> Path:
        return self.outputs.resolve() / ROWS

    def _check_rows_here(self) -> None:
        if self.deployment is not None and self.deployment.attached:
            raise UserError(
                "rows: expected a path on the services' volume, since they run elsewhere, got rows; copy a file of "
                "them there and give its path"
            )

    def _free_name(self) -> str:
        return next(name for number in count(1) if not (self.outputs / (name := f"run-{number}")).exists())

    @contextmanager
    def _functions(
        self, name: str, tools: Sequence[Function], reward: Function | None, deployment: Deployment | None
    ) -> Generator[tuple[list[str], ExitStack]]:
        """Serve the functions, and give them to a deployment that runs, until the end of the block or of its stack.

        Yields the keys of a run that uses them, and the stack, which `pop_all` keeps beyond the block.
        """
        with ExitStack() as stack:
            words: list[str] = []
            if tools or reward is not None:
                if deployment is not None:
                    _check_free(deployment, name)
                file = Deployment.path(self.outputs.resolve()).with_name(functions_file_of(name))
                functions = Functions(tools, reward, file)
                stack.callback(self._take, file)
                stack.callback(functions.close)
                if deployment is not None:
                    self._reload(deployment, _with_functions(deployment.serve_config, file))
                words = overrides({"trackway": {"functions_file": str(file)}})
            yield words, stack

    def _take(self, file: Path) -> None:
        """Let services that still run do without the functions of this file, if they have them."""
        deployment = self.deployment
        if deployment is None or deployment.attached:
            return
        config = _without_functions(deployment.serve_config, file)
        if config != deployment.serve_config:
            self._reload(deployment, config)

    def _reload(self, deployment: Deployment, config: dict[str, Any]) -> None:
        with board(False) as parts:
            reload(deployment, parts.report, config)


def _check_free(deployment: Deployment, name: str) -> None:
    """Raise UserError if the deployment cannot call this process, or if a run on it would lose its functions."""
    if deployment.attached:
        raise UserError(
            f"tools, reward: expected no functions, since the services run elsewhere ({deployment.address}), got some; "
            "put them into a module that is installed there and name it in trackway.modules"
        )
    others = [run for run in RunSession(deployment).active() if run != name]
    if others:
        raise UserError(
            f"tools, reward: expected services without another run, got {', '.join(others)}, whose tools and reward "
            "these would replace; wait until it ends, or give another outputs="
        )


def _with_functions(config: dict[str, Any], file: Path) -> dict[str, Any]:
    for service in _FUNCTIONS:
        config = serve_config.with_options(config, service, {"functions_file": str(file)})
    return config


def _without_functions(config: dict[str, Any], file: Path) -> dict[str, Any]:
    """The Serve config as it was before `_with_functions` with this file."""
    before = copy.deepcopy(config)
    for application in before["applications"]:
        args = application.get("args", {})
        if args.get("functions_file") == str(file):
            del args["functions_file"]
            args.pop("code_version", None)  # `reload` sets that of other own code
    return before


def _config(config: str | Path) -> tuple[Path | None, str]:
    """The file and the name of a configuration."""
    is_file = isinstance(config, Path) or config.endswith((".yaml", ".yml"))
    return (Path(config), "default") if is_file else (None, str(config))


def local(outputs: str | Path = "outputs") -> Services:
    """The services of this machine: those that run for the outputs folder, or those that the first run starts.

    with trackway.local() as services: run = services.train(rows).wait()
    """
    return Services(Path(outputs))


def connect(
    url: str,
    token: str | None = None,
    *,
    outputs: str | Path = "outputs",
    ray_url: str | None = None,
    mlflow_uri: str | None = None,
) -> Services:
    """Services that run elsewhere, at the address above their prefixes, such as `http://127.0.0.1:8000`.

    token: the bearer token, by default TRACKWAY_TOKEN. It is written nowhere.
    outputs: the folder that notes the address, as `trackway attach` does.
    Raises UserError when they cannot be reached, and TrackwayError when they refuse the token.
    """
    services = Services(Path(outputs), SecretStr(token) if token else None)
    with services.authorised(), board(False) as parts:
        attach(url, (), ray_url, mlflow_uri, services.outputs, 0.0, parts.report)
    return services


def train(
    rows: RowsGiven | None = None,
    *,
    model: str | Path | None = None,
    tools: Sequence[Function] = (),
    reward: Function | None = None,
    held_out: RowsGiven | None = None,
    run: str | None = None,
    config: str | Path = "default",
    outputs: str | Path = "outputs",
    **keys: Any,
) -> Run:
    """Start a run on the services of an outputs folder, as `local(outputs).train` does, which has the parameters.

    Services that it starts stop when `Run.wait` or `Run.stop` ends.
    """
    services = local(outputs)
    given = {"tools": tools, "reward": reward, "held_out": held_out, "run": run, "config": config, **keys}
    return services.train(rows, model=model, **given).then(services.close)


def evaluate(
    what: Run | str | Path,
    rows: RowsGiven | None = None,
    *,
    n: int = 1,
    tools: Sequence[Function] = (),
    reward: Function | None = None,
    outputs: str | Path = "outputs",
    **options: Any,
) -> Evaluated:
    """Roll out each row n times and summarise the scores. `local(outputs).evaluate` has the other parameters."""
    return local(outputs).evaluate(what, rows, n=n, tools=tools, reward=reward, **options)


def rollout(
    what: Run | str | Path, rows: RowsGiven, *, n: int = 1, outputs: str | Path = "outputs", **options: Any
) -> "pandas.DataFrame":
    """Roll out each row n times and return the trajectories. `local(outputs).evaluate` has the other parameters."""
    return local(outputs).rollout(what, rows, n=n, **options)
