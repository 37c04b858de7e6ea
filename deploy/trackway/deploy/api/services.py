"""Services for training and evaluation from Python: `local`, `connect`, and the calls that start what they need."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pydantic import SecretStr

from trackway.clients.token import using_token
from trackway.deploy.api.evaluated import Evaluated
from trackway.deploy.api.functions import Function, Functions
from trackway.deploy.api.given import RowsGiven, overrides, row_files
from trackway.deploy.api.run import Run
from trackway.deploy.checks.run import check_run
from trackway.deploy.config import serve_config
from trackway.deploy.deployment.attach import attach
from trackway.deploy.deployment.record import Deployment
from trackway.deploy.deployment.running import recorded
from trackway.deploy.local.reload import reload
from trackway.deploy.local.settings import UpSettings
from trackway.deploy.runs import evaluate as evaluations
from trackway.deploy.runs.prepare import prepare
from trackway.deploy.runs.session import RunSession
from trackway.deploy.terminal.progress import board, row_bar, stderr
from trackway.system.user_error import UserError
from trackway.wire.names import checked_run_name

if TYPE_CHECKING:
    import pandas

_FUNCTIONS = ("tools", "reward")


class Services:
    """The services of an outputs folder. As a context manager, it stops at its end those that it started."""

    def __init__(self, outputs: Path, token: SecretStr | None = None) -> None:
        self.outputs = outputs
        self._token = token
        self._session: RunSession | None = None

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
        session, self._session = self._session, None
        if session is not None and session.own:
            with self.authorised(), board(False) as shown:
                session.close(shown.report)

    def train(
        self,
        rows: RowsGiven,
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
            dataset.
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
        files = {"train_files": self._files(rows), **({} if held_out is None else {"val_files": self._files(held_out)})}
        words = [*_words(model, keys), *overrides({"data": files, "trainer": {"experiment_name": name}})]
        with self.authorised(), self._functions(name, tools, reward, keep=True) as functions:
            subject = prepare([*words, *functions.words], *_config(config), self._settings())
            with board(False) as shown:
                checked = check_run(subject, True, shown.report)
            checked.findings.refuse()
            if subject.resumes:
                stderr.print(f"resuming {subject.resumes}", soft_wrap=True)
            with board(False) as shown:
                session = RunSession.open(subject, shown.report)
            self._session = session if self._session is None else self._session
            info = session.submit(subject, lambda info: None)
        return Run(self, session, info, functions.close)

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
        tools: Sequence[Function] = (),
        reward: Function | None = None,
        config: str | Path = "default",
        **keys: Any,
    ) -> Evaluated:
        """Roll out each row n times and summarise the scores.

        what: a run or its name, a checkpoint, a model's folder or Hugging Face id, or `running`.
        rows: by default the run's held-out rows.
        limit: take the first rows only.
        temperature: 0 is greedy; by default as in training.
        pass_above: a rollout passes with a score over it.
        step: the step of the run's checkpoint, by default the newest. 0 is the model that the run started from.
        run: the name of the evaluation.
        For the other parameters, see `train`. Raises UserError and TrackwayError as it does.
        """
        target = what.name if isinstance(what, Run) else str(what)
        with (
            self.authorised(),
            self._functions(run or f"evaluation-of-{Path(target).name}", tools, reward) as functions,
        ):
            options = evaluations.Options(None, n, limit, temperature, pass_above, step, run)
            words = [*_words(None, keys), *functions.words]
            if rows is not None:
                words += overrides({"data": {"val_files": self._files(rows)}})
            evaluation = evaluations.prepare(target, options, words, *_config(config), self.outputs)
            with board(False) as shown:
                findings, checked = evaluation.check(shown.report)
            findings.refuse()
            assert checked is not None
            with row_bar(False) as bar:
                evaluation.run(checked, bar.report, bar.show)
            return Evaluated(evaluation.store)

    def rollouts(self, what: Run | str | Path, rows: RowsGiven, **options: Any) -> "pandas.DataFrame":
        """Roll out each row, and return the trajectories. For the parameters, see `evaluate`."""
        return self.evaluate(what, rows, **options).trajectories()

    @contextmanager
    def authorised(self) -> Iterator[None]:
        """Send this object's token in the calls of a block."""
        with using_token(self._token):
            yield

    def _settings(self) -> UpSettings:
        return UpSettings.read(outputs=self.outputs)

    def _files(self, rows: RowsGiven) -> list[str]:
        files = row_files(rows, self.outputs)
        deployment = self.deployment
        if deployment is not None and deployment.attached and Path(files[0]).parent == self.outputs.resolve() / "rows":
            raise UserError(
                "rows: expected a path on the services' volume, since they run elsewhere, got rows; copy a file of "
                "them there and give its path"
            )
        return files

    def _free_name(self) -> str:
        return next(name for number in count(1) if not (self.outputs / (name := f"run-{number}")).exists())

    @contextmanager
    def _functions(
        self, name: str, tools: Sequence[Function], reward: Function | None, keep: bool = False
    ) -> Iterator["_Served"]:
        """Serve the functions, and give them to services that run, until `_Served.close`.

        It is called at the end of the block, or with `keep` if the block raises.
        """
        served = _Served([], lambda: None)
        if tools or reward is not None:
            served = self._serve(checked_run_name(name), tools, reward)
        try:
            yield served
        except BaseException:
            served.close()
            raise
        if not keep:
            served.close()

    def _serve(self, name: str, tools: Sequence[Function], reward: Function | None) -> "_Served":
        deployment = self.deployment
        if deployment is not None and deployment.attached:
            raise UserError(
                f"tools, reward: expected no functions, since the services run elsewhere ({deployment.address}), got "
                "some; put them into a module that is installed there and name it in trackway.modules"
            )
        file = Deployment.path(self.outputs.resolve()).with_name(f"functions-{name}.json")
        functions = Functions(tools, reward, file)
        before = None if deployment is None else _without_functions(deployment.serve_config)
        if deployment is not None and before is not None:
            self._reload(deployment, _with_functions(before, str(functions.file)))

        def close() -> None:
            functions.close()
            running = self.deployment
            if running is not None and (self._session is None or not self._session.own):
                self._reload(running, before or _without_functions(running.serve_config))

        return _Served(overrides({"trackway": {"functions_file": str(functions.file)}}), close)

    def _reload(self, deployment: Deployment, config: dict[str, Any]) -> None:
        with board(False) as shown:
            reload(deployment, shown.report, config)


def _with_functions(config: dict[str, Any], file: str | None) -> dict[str, Any]:
    """The Serve config whose services take the tools and the scorer of this file."""
    for service in _FUNCTIONS:
        config = serve_config.with_options(config, service, {"functions_file": file})
    return config


def _without_functions(config: dict[str, Any]) -> dict[str, Any]:
    """The same config, if it names no file, so that restoring it restarts nothing else."""
    named = any(serve_config.args_of(config, service).get("functions_file") for service in _FUNCTIONS)
    return _with_functions(config, None) if named else config


class _Served:
    """Functions that are served: the keys of a run that uses them, and their end."""

    def __init__(self, words: list[str], close: Callable[[], None]) -> None:
        self.words = words
        self._close: Callable[[], None] | None = close

    def close(self) -> None:
        """End them, once."""
        close, self._close = self._close, None
        if close is not None:
            close()


def _words(model: str | Path | None, keys: dict[str, Any]) -> list[str]:
    path = {} if model is None else {"actor_rollout_ref.model.path": str(model)}
    return overrides({**path, **keys})


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
    with services.authorised(), board(False) as shown:
        attach(url, (), ray_url, mlflow_uri, services.outputs, 0.0, shown.report)
    return services


def train(rows: RowsGiven, *, outputs: str | Path = "outputs", **options: Any) -> Run:
    """Do `local(outputs).train(...)`. Services that it starts stop when `Run.wait` or `Run.stop` ends."""
    services = local(outputs)
    run = services.train(rows, **options)
    return run.then(services.close)


def evaluate(
    what: Run | str | Path, rows: RowsGiven | None = None, *, outputs: str | Path = "outputs", **options: Any
) -> Evaluated:
    """Do `local(outputs).evaluate(...)`."""
    return local(outputs).evaluate(what, rows, **options)


def rollouts(
    what: Run | str | Path, rows: RowsGiven, *, outputs: str | Path = "outputs", **options: Any
) -> "pandas.DataFrame":
    """Do `local(outputs).rollouts(...)`."""
    return local(outputs).rollouts(what, rows, **options)
