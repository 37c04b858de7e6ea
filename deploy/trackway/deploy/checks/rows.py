"""Checks of a run's dataset rows and of the length of their prompts."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from trackway.deploy.checks.findings import Findings
from trackway.deploy.deployment.processes import Report
from trackway.run_config import RunConfig
from trackway.trainer.data.dataset import RowChoice, Rows, load_rows
from trackway.trainer.data.name_check import Served
from trackway.wire.errors import ErrorCode, TrackwayError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MEASURED_ROWS = 10_000
"""Most prompts per key that a dry run tokenizes. More would take minutes."""
WORDS_PER_TOKEN = 4
"""Upper bound of the average number of words per token of a prompt."""
KEYS = {"data.train_files": "train_max_samples", "data.val_files": "val_max_samples"}
_SHOWN_EVERY = 500
"""Prompts between two progress reports."""


class RowsHere:
    """Reads a run's files and measures its prompts. Problems are added to the findings."""

    def __init__(self, config: RunConfig, findings: Findings, report: Report, most_measured: int | None) -> None:
        self._config = config
        self._findings = findings
        self._report = report
        self._most_measured = most_measured
        self._read: dict[str, Rows] = {}
        self.used: dict[str, Rows] = {}
        """Rows that the run uses, by key: without overlong prompts, and within the `max_samples` bound."""
        self.sentence = "unknown: data.train_files is empty"
        """The number of training rows, in words."""
        self._conversations: int | None = None
        """The number of rows of supervised training."""

    @property
    def number(self) -> int | None:
        """The number of training rows, or None when unknown."""
        rows = self.used.get("data.train_files")
        return self._conversations if rows is None else len(rows.samples)

    def leave_to_the_trainer(self) -> None:
        """Record that the files are on other machines and were not checked."""
        files = [file for key in KEYS for file in self._files(key)]
        if files:
            self.sentence = "unknown: the files are on the services' machines"
            self._findings.not_checked.append(
                f"rows: {', '.join(files)} are on the services' machines; the trainer checks them before the first step"
            )

    def read(self) -> None:
        """Read every file."""
        with self._findings.part(self._report, "rows", "reading"):
            for key in KEYS:
                rows = self._rows_of(key)
                if rows is not None and rows.samples:
                    self._read[key] = rows
                elif rows is None and key == "data.train_files":
                    self.sentence = "unknown: not every file could be read"

    def read_conversations(self, tokenizer: "PreTrainedTokenizerBase | None") -> None:
        """Read the rows of supervised training, and encode them as the run will, if there are not too many."""
        from trackway.chat.tokens import ChatTokens
        from trackway.trainer.data.conversations import encoded, load_conversations

        data = self._config.data
        with self._findings.part(self._report, "rows", "reading"):
            for key in KEYS:
                try:
                    rows = load_conversations(self._files(key), self._choice(key), data)
                    if key == "data.train_files":
                        self._conversations, self.sentence = len(rows), str(len(rows))
                    if tokenizer is None or len(rows) > (self._most_measured or len(rows)):
                        self._findings.not_checked.append(f"{key}: whether rows fit data.max_length={data.max_length}")
                    else:
                        encoded(rows, ChatTokens(tokenizer, data.apply_chat_template_kwargs), data)
                except (TrackwayError, ValueError) as error:
                    absent = isinstance(error, TrackwayError) and error.code is ErrorCode.NOT_FOUND
                    (self._findings.not_found if absent else self._findings.wrong).append(f"{key}: {error}")

    def measure(self, tokenizer: "PreTrainedTokenizerBase | None", served: Served) -> None:
        """Count each prompt's tokens with the agent's chat template, and drop overlong prompts."""
        for key, rows in self._read.items():
            reason = self._unmeasurable(tokenizer, served, len(rows.samples))
            if reason:
                self._without_lengths(key, rows, reason)
            else:
                assert tokenizer is not None
                self._with_lengths(key, rows, tokenizer, served)

    def _files(self, key: str) -> Sequence[str]:
        return getattr(self._config.data, key.removeprefix("data."))

    def _rows_of(self, key: str) -> Rows | None:
        """The rows of all files of a key, or None when a file is missing or invalid."""
        read: list[Rows] = []
        for file in self._files(key):
            if "://" in file:
                self._findings.wrong.append(f"{key}: expected a file, got the URL {file}; give the path of a copy")
                continue
            try:
                read.append(load_rows([file], columns=self._config.data.columns))
            except TrackwayError as error:
                absent = error.code is ErrorCode.NOT_FOUND
                (self._findings.not_found if absent else self._findings.wrong).append(f"{key}: {error.message}")
            except OSError as error:
                self._findings.missing_here.append(f"{key}: expected a file that can be read, got {file}: {error}")
        if len(read) < len(self._files(key)):
            return None
        rows = Rows(
            [row for part in read for row in part.samples], [place for part in read for place in part.locations]
        )
        choice = self._choice(key)
        return rows if choice.of_kept else rows.at(choice.positions(len(rows.samples)))

    def _unmeasurable(self, tokenizer: object, served: Served, rows: int) -> str:
        """The reason why prompts cannot be measured. Empty when they can."""
        if tokenizer is None:
            return f"the tokenizer of {self._config.actor_rollout_ref.model.path} cannot be used on this machine"
        if served.tools is None:
            return "the tools described in the prompts are unknown"
        if self._most_measured is not None and rows > self._most_measured:
            return f"more than {self._most_measured} rows"
        return ""

    def _without_lengths(self, key: str, rows: Rows, reason: str) -> None:
        data = self._config.data
        self._use(key, rows, range(len(rows.samples)))
        if key == "data.train_files" and data.filter_overlong_prompts:
            self.sentence += f"; prompts of more than {data.max_prompt_length} tokens are not removed yet: {reason}"
        words = min(sum(len(str(message.content).split()) for message in row.prompt) for row in rows.samples)
        if words > WORDS_PER_TOKEN * data.max_prompt_length:
            self._findings.wrong.append(
                f"{key}: expected prompts of at most data.max_prompt_length={data.max_prompt_length} tokens, got "
                f"none in {len(rows.samples)} rows, the shortest has {words} words; raise it"
            )
        elif reason:
            self._findings.not_checked.append(f"{key}: the length of prompts: {reason}")

    def _with_lengths(self, key: str, rows: Rows, tokenizer: "PreTrainedTokenizerBase", served: Served) -> None:
        from trackway.trainer.data.prompt_filter import PromptFilter

        data, names = self._config.data, self._config.trackway.tools
        offered = [tool for tool in served.schemas if names is None or tool.function.name in names]
        measure = PromptFilter(
            tokenizer,
            offered,
            data.max_prompt_length,
            self._config.default_agent,
            data.apply_chat_template_kwargs,
        )
        lengths: list[int] = []
        try:
            for length in measure.lengths(rows.samples, key):
                if len(lengths) % _SHOWN_EVERY == 0:
                    self._report("prompts", f"measured: {len(lengths)} of {len(rows.samples)}")
                lengths.append(length)
        except TrackwayError as error:
            self._findings.wrong.append(error.message)
            self._use(key, rows, range(len(rows.samples)))
            return
        finally:
            self._report("prompts", "ready")
        fitting = [position for position, length in enumerate(lengths) if length <= data.max_prompt_length]
        kept = fitting if data.filter_overlong_prompts else range(len(lengths))
        self._use(key, rows, kept)
        if key == "data.train_files" and data.filter_overlong_prompts:
            self.sentence = f"{len(lengths)}, of which {len(fitting)} have at most {data.max_prompt_length} tokens"
        if data.filter_overlong_prompts and not fitting:
            self._findings.wrong.append(measure.none_fits(lengths, key))
        elif not data.filter_overlong_prompts and data.truncation == "error":
            self._refuse_overlong(key, lengths)

    def _refuse_overlong(self, key: str, lengths: Sequence[int]) -> None:
        used, bound = self.used[key], self._config.data.max_prompt_length
        overlong = [position for position in range(len(used.samples)) if lengths[position] > bound]
        if overlong:
            self._findings.wrong.append(
                f"{key}: expected prompts of at most data.max_prompt_length={bound} tokens, tool schemas included, got "
                f"{len(overlong)} of {len(used.samples)} rows with up to "
                f"{max(lengths[position] for position in overlong)} ({used.describe(overlong)}), whose trajectories "
                "would all fail; raise it, set data.filter_overlong_prompts=true, or truncate with data.truncation"
            )

    def _use(self, key: str, rows: Rows, positions: Sequence[int]) -> None:
        choice = self._choice(key)
        if choice.of_kept:
            positions = [positions[position] for position in choice.positions(len(positions))]
        self.used[key] = rows.at(positions)
        if key == "data.train_files":
            self.sentence = str(len(positions))

    def _choice(self, key: str) -> RowChoice:
        return RowChoice.of(self._config, getattr(self._config.data, KEYS[key]))
