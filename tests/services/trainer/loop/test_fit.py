"""The fit loop over a scripted agent: when it validates and saves, and what a checkpoint holds."""

import asyncio
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.services.trainer.learner_settings import logprobs_of
from tests.waiting import async_until
from trackway.clients import AgentClient
from trackway.clients.weights import WeightStore
from trackway.deploy.bundled import TINY_MODEL
from trackway.learner.learner import Learner
from trackway.run_config import RunConfig, compose
from trackway.system import StorageError
from trackway.trainer.data.dataset import PromptBatches, Prompts
from trackway.trainer.delivery import FileSink
from trackway.trainer.loop import base as training_module
from trackway.trainer.loop.base import Profiler
from trackway.trainer.loop.fit import fit
from trackway.trainer.loop.from_config import (
    group_filter,
    learner_config,
    pacing,
    plan,
    session_limits,
    training_template,
    validation_template,
)
from trackway.trainer.loop.group_source import GroupSource
from trackway.trainer.loop.resume import begin
from trackway.trainer.loop.rollout_client import RetryPolicy, Rollouts
from trackway.trainer.loop.schedule import Progress
from trackway.trainer.loop.scheduler import GroupScheduler
from trackway.trainer.loop.session_groups import SessionGroups, SessionSlots
from trackway.trainer.loop.training import Training, Validation
from trackway.trainer.loop.weight_publisher import Publisher
from trackway.trainer.metrics import Metrics
from trackway.trainer.run_state.checkpoint import find_damage, find_latest
from trackway.trainer.run_state.folder import RunFolder
from trackway.trainer.run_state.session_inbox import SessionInbox
from trackway.trainer.run_state.trajectories import Generations, read_trajectories
from trackway.trainer.service_urls import ServiceUrls
from trackway.trainer.traces.run import DailyTraceBytes, RunTraces, SpanAccounts, StepTrace, TraceBudget
from trackway.wire.agent import Sample
from trackway.wire.errors import ErrorBody, ErrorCode, TrackwayError
from trackway.wire.service import SpanCounts
from trackway.wire.sessions import FinishedSession
from trackway.wire.trainer import RunState
from trackway.wire.trajectory import Reward, TeacherScores, TraceTarget, Trajectory

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.usefixtures("shared_http")]

ACCURACY = "val-core/openai/gsm8k/acc/mean@1"
NewRun = Callable[..., Training]


@pytest.fixture
def new_run(tmp_path: Path, sample, agent_url: str, tiny_model: Path) -> Iterator[NewRun]:
    """Makes a run of 2 prompts and 2 rollouts per step; called with its name and overrides."""
    made: list[Training] = []

    def make(name: str, *overrides: str, model: Path = tiny_model) -> Training:
        for earlier in made:
            earlier.publisher.close()
        ours = ["data.train_batch_size=2", "actor_rollout_ref.actor.ppo_mini_batch_size=2", "data.shuffle=false"]
        config = compose([*ours, "actor_rollout_ref.rollout.n=2", f"actor_rollout_ref.model.path={model}", *overrides])
        urls = ServiceUrls(agent_url=agent_url, tools_url="http://127.0.0.1:9", weights_url=str(tmp_path / "weights"))
        folder = RunFolder(tmp_path / "outputs" / name)
        if not folder.exists:
            folder.create(config, urls)
        made.append(training(config, folder, [sample(index) for index in range(4)], agent_url))
        return made[-1]

    yield make
    for run in made:
        run.publisher.close()


def training(config: RunConfig, folder: RunFolder, rows: list, agent_url: str) -> Training:
    prompts: PromptBatches = Prompts(rows, 2, 0, shuffle=False)
    schedule, target = plan(config, prompts.steps_per_epoch), TraceTarget()
    learner = Learner(learner_config(config, schedule.total_steps))
    beginning = begin(folder, config, learner)
    store = WeightStore(folder.services().weights_url)

    def rollouts(template) -> Rollouts:
        return Rollouts(AgentClient(agent_url), template, RetryPolicy())

    template, resumed = training_template(config, folder.name, target), beginning.progress.scheduler
    source: GroupSource = rollouts(template)
    if config.trackway.rollouts_from == "sessions":
        source = SessionGroups(SessionInbox(folder.path), template, session_limits(config), resumed.drawn)
        prompts = SessionSlots(2, schedule.total_steps)
    return Training(
        plan=replace(schedule, traced_validation=0),
        folder=folder,
        scheduler=GroupScheduler(
            prompts,
            source,
            pacing(config),
            resumed,
            beginning.finished,
            group_filter(config),
        ),
        validation=Validation(rows[:2], rollouts(validation_template(config, folder.name, target))),
        learner=learner,
        publisher=Publisher(store, learner, folder.name, folder.info().uid, folder.path / "export", 2),
        sinks=[FileSink(folder)],
        traces=RunTraces(
            target=target,
            own=StepTrace("experiment", target),
            budget=TraceBudget(DailyTraceBytes(folder.path.parent / "trace_bytes.json"), 1_000_000),
            accounts=SpanAccounts({}, SpanCounts),
            tracing=None,
            feedback=[],
        ),
        beginning=beginning,
    )


def validated(run: Training) -> list[int]:
    return [row.step for row in run.folder.rows() if ACCURACY in row.data]


def checkpoints(run: Training) -> list[str]:
    return sorted(path.name for path in run.folder.checkpoints.glob("global_step_*"))


@pytest.mark.parametrize(
    ("overrides", "steps"),
    [
        (["trainer.test_freq=2"], [0, 2, 4, 5]),
        (["trainer.test_freq=-1"], [0, 5]),
        (["trainer.test_freq=2", "trainer.val_before_train=false"], [2, 4, 5]),
    ],
)
async def test_it_validates_before_every_so_many_steps_and_at_the_end(
    new_run: NewRun, overrides: list[str], steps: list[int]
):
    run = new_run("run", "trainer.total_training_steps=5", *overrides)

    assert await fit(run) is RunState.FINISHED
    assert validated(run) == steps


async def test_a_run_that_only_validates_does_it_once_trains_nothing_and_saves_nothing(new_run: NewRun, agent):
    run = new_run("run", "trainer.val_only=true", "trainer.val_before_train=false")

    assert await fit(run) is RunState.FINISHED
    assert [(request.step, request.validation) for request in agent.requests] == [(0, True)] * 2
    assert (validated(run), checkpoints(run)) == ([0], [])


async def test_a_run_begins_at_another_runs_checkpoint_validates_there_and_goes_on(new_run: NewRun, agent):
    first = new_run("first", "trainer.total_training_steps=3", "trainer.save_freq=1")
    await fit(first)
    agent.requests.clear()

    path = first.folder.checkpoints / "global_step_1"
    second = new_run(
        "second",
        *("trainer.total_training_steps=3", "trainer.resume_mode=resume_path"),
        f"trainer.resume_from_path={path}",
    )
    await fit(second)

    def learned(run: Training) -> list[float]:
        return [row.data["actor/grad_norm"] for row in run.folder.rows() if row.step > 1]

    asked = {request.step: set() for request in agent.requests if not request.validation}
    assert (sorted(asked), validated(second), checkpoints(second)) == ([2, 3], [1, 3], ["global_step_3"])
    assert learned(second) == learned(first)
    assert logprobs_of(second.learner) == logprobs_of(first.learner)


async def test_a_run_over_sessions_trains_each_once_and_keeps_no_file_of_them(new_run: NewRun, rollout):
    keys = ["trackway.rollouts_from=sessions", "trainer.total_training_steps=2", "trainer.save_freq=1"]
    first = new_run("run", *keys)
    inbox = SessionInbox(first.folder.path)
    ids = [f"s-abcd-{number:032x}" for number in range(8)]
    sessions = [
        FinishedSession(session_id=session_id, group=number // 2, trajectory=rollout(0, 0, float(number % 2)))
        for number, session_id in enumerate(ids)
    ]
    for session in sessions[:4]:
        inbox.put(session)
    fitting = asyncio.create_task(fit(first))
    await async_until(lambda: first.step >= 1 and first.saved_step == 1)
    fitting.cancel()
    await asyncio.gather(fitting, return_exceptions=True)
    for session in sessions:  # the first four come again
        inbox.put(session)
    second = new_run("run", *keys)

    assert await fit(second) is RunState.FINISHED
    trained = [read_trajectories(second.folder.path / "trajectories" / f"step_{step}.parquet") for step in (1, 2)]
    assert [[trajectory.session_id for trajectory in step] for step in trained] == [ids[:4], ids[4:]]
    assert inbox.waiting() == [] and list((second.folder.path / "sessions" / "drawn").iterdir()) == []
    account = {state: count for state, count in second.scheduler.account().items() if count}
    assert account == {"submitted": 8, "used": 8}


async def test_a_run_warms_its_value_model_up_saves_it_and_resumes_with_it(new_run: NewRun):
    keys = ("trainer.total_training_steps=3", "trainer.save_freq=1", "algorithm.adv_estimator=gae")
    keys += ("trainer.critic_warmup=2", "critic.optim.lr=1e-2")
    first = new_run("first", *keys)
    await fit(first)

    path = first.folder.checkpoints / "global_step_1"
    second = new_run("second", *keys, "trainer.resume_mode=resume_path", f"trainer.resume_from_path={path}")
    await fit(second)

    def learned(run: Training, name: str) -> list[float | None]:
        return [row.data.get(name) for row in run.folder.rows() if row.step > 1]

    names = ("critic/vf_loss", "critic/values/mean", "critic/grad_norm", "actor/grad_norm")
    assert [learned(second, name) for name in names] == [learned(first, name) for name in names]
    assert None not in learned(first, "critic/vf_loss") + learned(first, "actor/grad_norm")
    [warm_up] = [row.data for row in first.folder.rows() if row.step == 1]
    assert {"critic/vf_loss", "timing_s/values", "timing_s/update_critic", "timing_s/update_actor"} <= warm_up.keys()
    assert "actor/grad_norm" not in warm_up
    manifest = (path / "manifest.json").read_text()
    assert all(f"critic/{name}.safetensors" in manifest for name in ("model", "optim", "extra_state"))


async def test_a_run_that_only_validates_a_named_checkpoint_holds_its_weights(new_run: NewRun):
    first = new_run("first", "trainer.total_training_steps=1", "actor_rollout_ref.actor.optim.lr=1e-2")
    before = logprobs_of(first.learner)
    await fit(first)

    path = first.folder.checkpoints / "global_step_1"
    only = new_run(
        "only", "trainer.val_only=true", "trainer.resume_mode=resume_path", f"trainer.resume_from_path={path}"
    )
    await fit(only)

    assert validated(only) == [1]
    assert logprobs_of(only.learner) == logprobs_of(first.learner) != before


async def test_a_stop_before_the_first_step_does_not_validate_twice(new_run: NewRun):
    first = new_run("run", "trainer.total_training_steps=2")
    first.stop.set()
    assert await fit(first) is RunState.STOPPED

    again = new_run("run", "trainer.total_training_steps=2")
    await fit(again)

    assert again.progress == Progress(step=2, position=again.progress.position, versions=again.progress.versions)
    assert validated(again) == [0, 2]


@pytest.mark.parametrize(("steps", "save_freq", "rows"), [(3, 1, [0, 2, 3]), (3, 2, [0, 2, 3]), (2, -1, [0, 2])])
async def test_a_validation_that_a_stop_cut_off_is_done_when_the_run_goes_on(
    new_run: NewRun, monkeypatch: pytest.MonkeyPatch, steps: int, save_freq: int, rows: list[int]
):
    words = [f"trainer.total_training_steps={steps}", "trainer.test_freq=2", f"trainer.save_freq={save_freq}"]
    first = new_run("run", *words)
    collect = first.validation.rollouts.collect

    async def stopped_in_step_2(batch, step: int, *given):
        if step == 2:
            first.stop.set()
            await asyncio.Event().wait()
        return await collect(batch, step, *given)

    monkeypatch.setattr(first.validation.rollouts, "collect", stopped_in_step_2)
    assert (await fit(first), first.step) == (RunState.STOPPED, 2)

    again = new_run("run", *words)
    assert await fit(again) is RunState.FINISHED

    written = again.folder.rows()
    assert [row.step for row in written] == list(range(steps + 1))
    assert validated(again) == rows
    assert {"actor/pg_loss", "timing_s/gen", "training/global_step"} <= written[2].data.keys()


async def test_saves_follow_save_freq_and_the_last_step_and_only_the_newest_are_kept(new_run: NewRun):
    run = new_run("run", "trainer.total_training_steps=5", "trainer.save_freq=2", "trainer.max_actor_ckpt_to_keep=2")

    await fit(run)

    assert checkpoints(run) == ["global_step_4", "global_step_5"]


async def test_each_checkpoint_is_copied_once_the_storage_takes_it(
    new_run: NewRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    copy, refusals = training_module.copy_checkpoint, [StorageError(ErrorCode.UNAVAILABLE, "no bucket")]

    def refused_once(*given: Any) -> None:
        if refusals:
            raise refusals.pop()
        copy(*given)

    monkeypatch.setattr(training_module, "copy_checkpoint", refused_once)
    monkeypatch.setattr(training_module, "STORAGE_RETRY_S", 0.01)
    keys = ("trainer.total_training_steps=3", "trainer.save_freq=1", "trainer.max_actor_ckpt_to_keep=2")
    run = new_run("run", *keys, f"trainer.default_hdfs_dir=file://{tmp_path}/copies")

    assert await fit(run) is RunState.FINISHED

    copies = tmp_path / "copies/run"
    assert sorted(path.name for path in copies.iterdir()) == ["global_step_2", "global_step_3"]
    assert [find_damage(path) for path in copies.iterdir()] == [None, None]


async def test_training_goes_on_while_a_checkpoint_is_written_and_the_next_one_waits_for_it(
    new_run: NewRun, monkeypatch: pytest.MonkeyPatch
):
    release, save = threading.Event(), training_module.save_checkpoint

    def slow(root: Path, step: int, *given: Any) -> Path:
        assert step > 1 or release.wait(60)
        return save(root, step, *given)

    monkeypatch.setattr(training_module, "save_checkpoint", slow)
    keys = ("trainer.total_training_steps=3", "trainer.save_freq=1", "trackway.storage_wait_s=5")
    run = new_run("run", *keys)
    fitting = asyncio.create_task(fit(run))
    async with asyncio.timeout(60):
        while not (waits := [wait for wait in run.waits.current() if wait.who == "the learner"]):
            await asyncio.sleep(0.01)
    step, before = run.step, checkpoints(run)
    release.set()

    assert await fitting is RunState.FINISHED
    assert (step, before) == (2, [])
    assert [(wait.waits_for, (wait.until or 0) - wait.since) for wait in waits] == [
        ("the checkpoint of step 1", (training_module.CHECKPOINT_WAIT_S + 5) * 1000)
    ]
    assert checkpoints(run) == ["global_step_1", "global_step_2", "global_step_3"]


async def test_a_checkpoint_that_cannot_be_written_ends_the_run_before_its_next_rollout(
    new_run: NewRun, agent, monkeypatch: pytest.MonkeyPatch
):
    def refused(*given: Any) -> Path:
        raise StorageError(ErrorCode.NOT_WRITABLE, "no such disk")

    monkeypatch.setattr(training_module, "save_checkpoint", refused)
    run = new_run("run", "trainer.total_training_steps=9", "trainer.save_freq=1", "trackway.storage_wait_s=0.01")

    with pytest.raises(StorageError, match="no such disk"):
        await fit(run)

    assert run.step <= 2
    assert run.saved_step is None


async def test_with_async_save_off_a_step_ends_when_its_checkpoint_is_written(new_run: NewRun):
    run = new_run(
        "run",
        "trainer.total_training_steps=1",
        "actor_rollout_ref.actor.checkpoint.async_save=false",
    )
    run.progress = run.progress.model_copy(update={"step": 1})

    await run.save()

    assert checkpoints(run) == ["global_step_1"]


async def test_each_checkpoint_has_the_metrics_of_its_step(new_run: NewRun):
    run = new_run("run", "trainer.total_training_steps=2", "trainer.save_freq=1")

    await fit(run)

    rows = {f"global_step_{row.step}": row.data for row in run.folder.rows()}
    for name in ("global_step_1", "global_step_2"):
        saved = Progress.model_validate_json((run.folder.checkpoints / name / "state.json").read_bytes())
        of_step = {key: saved.metrics.get(key) for key in ("training/global_step", "actor/pg_loss", "actor/grad_norm")}
        assert of_step == {key: rows[name][key] for key in of_step}


async def test_transformers_loads_a_checkpoints_weights_and_tokenizer(new_run: NewRun):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    contents = "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model]"
    keys = ("trainer.total_training_steps=1", "actor_rollout_ref.actor.optim.lr=1e-2", contents)
    run = new_run("run", *keys, model=TINY_MODEL)
    await fit(run)

    folder = find_latest(run.folder.checkpoints)
    assert folder is not None
    model = AutoModelForCausalLM.from_pretrained(folder / "actor" / "huggingface", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder / "actor" / "huggingface")
    ids = list(range(3, 19))
    with torch.no_grad():
        logp = model(torch.tensor([ids])).logits.log_softmax(-1)[0]
    ours = logprobs_of(run.learner, ids)
    theirs = [float(logp[place, token]) for place, token in enumerate(ids[1:])]
    assert ours[-len(theirs) :] == pytest.approx(theirs, abs=1e-4)
    assert tokenizer.decode(tokenizer.encode("2+2")) == AutoTokenizer.from_pretrained(TINY_MODEL).decode(
        AutoTokenizer.from_pretrained(TINY_MODEL).encode("2+2")
    )


AHEAD = ("async_training.staleness_threshold=1", "trainer.total_training_steps=4", "trainer.save_freq=1")


def trained(run: Training) -> list[list[str]]:
    """The trajectories of each step, as `step of submission/prompt/rollout`."""
    files = [run.folder.path / "trajectories" / f"step_{step}.parquet" for step in range(1, run.step + 1)]
    return [[trajectory.id.removeprefix("run/") for trajectory in read_trajectories(file)] for file in files]


async def test_generation_goes_on_while_the_learner_computes(new_run: NewRun, agent):
    agent.holding_at = 2
    run = new_run("run", *AHEAD)
    fitting = asyncio.create_task(fit(run))
    await async_until(lambda: any(request.step == 3 for request in agent.requests))
    hanging = run.step
    agent.released.set()

    assert await fitting is RunState.FINISHED
    assert hanging == 2  # the groups submitted in step 1 train two steps, though those of step 2 have not ended
    assert sorted(request.step for request in agent.requests if not request.validation) == [1] * 4 + [2] * 2 + [3] * 2
    assert trained(run) == [
        [f"{step}/{row}/{n}" for row in rows for n in range(2)]
        for step, rows in [(1, (0, 1)), (1, (2, 3)), (2, (0, 1)), (3, (2, 3))]
    ]
    last = run.folder.rows()[-1].data
    assert [last[f"rollouts/{state}"] for state in ("submitted", "used", "running", "finished")] == [16, 16, 0, 0]
    assert [row.data["training/epoch"] for row in run.folder.rows()[1:]] == [0, 0, 1, 1]


FILTERED = ("algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric=acc", "trainer.save_freq=1")


def alike_in_row_1(trajectory: Trajectory) -> Trajectory:
    """All rollouts of row 1 are right."""
    if trajectory.tags.sample_index != 1:
        return trajectory
    return trajectory.model_copy(update={"reward": Reward(score=1.0, components={"acc": 1.0})})


async def test_a_row_without_a_difference_is_never_trained_and_a_killed_run_goes_on_the_same(new_run: NewRun, agent):
    agent.change = alike_in_row_1
    keys = (*FILTERED, "trainer.total_training_steps=4")
    whole = new_run("whole", *keys)
    await fit(whole)
    first = new_run("run", *keys)
    await fit(first)
    for step in (2, 3, 4):
        shutil.rmtree(first.folder.checkpoints / f"global_step_{step}")

    again = new_run("run", *keys)
    assert again.step == 1
    await fit(again)

    rows = [[int(name.split("/")[1]) for name in names[::2]] for names in trained(again)]
    assert rows == [[0, 2], [3, 0], [2, 3], [0, 2]]
    evicted = [row.data["training/filter_groups/evicted_samples"] for row in again.folder.rows()[1:]]
    assert evicted == [1, 0, 1, 1]
    assert again.folder.rows()[-1].data["rollouts/dropped_filtered"] == 6
    assert logprobs_of(again.learner) == logprobs_of(whole.learner)


async def test_a_step_that_takes_too_many_prompts_fails_the_run_and_keeps_the_newest_step(new_run: NewRun, agent):
    agent.change = alike_in_row_1
    run = new_run("run", *FILTERED[:2], "algorithm.filter_groups.max_num_gen_batches=1")

    with pytest.raises(TrackwayError, match=r"expected 2 groups whose .* 'acc'.*got 1; 1 were left out"):
        await fit(run)
    assert checkpoints(run) == ["global_step_0"]


async def test_samples_and_profiles_are_written_for_their_steps(new_run: NewRun, tmp_path: Path):
    run = new_run("run", "trainer.total_training_steps=2", "trainer.val_before_train=false")
    run.samples = Generations(tmp_path / "train", lambda ids: "text", {0: "1"})
    run.validation.samples = Generations(tmp_path / "val", lambda ids: "text", {0: "1"})
    run.profiler = Profiler(tmp_path / "profile", frozenset({2}))

    await fit(run)

    files = [(path.name, len(path.read_text().splitlines())) for path in sorted((tmp_path / "train").iterdir())]
    assert files == [("1.jsonl", 4), ("2.jsonl", 4)]
    assert [path.name for path in (tmp_path / "val").iterdir()] == ["2.jsonl"]
    assert [path.name for path in (tmp_path / "profile").iterdir()] == ["step_2.json.gz"]


def taught(trajectory: Trajectory) -> Trajectory:
    """The teacher's logprobs differ from token to token and from rollout to rollout."""
    scores = [-0.1 * (i + 1 + trajectory.tags.rollout_n) for i in range(sum(trajectory.response_mask))]
    return trajectory.model_copy(update={"teacher": TeacherScores(teacher="teacher_model", logprobs=scores)})


TAUGHT = (
    "distillation.enabled=true",
    "distillation.teacher_models.teacher_model.model_path=base",
    "distillation.distillation_loss.use_task_rewards=false",
)


@pytest.mark.parametrize("keys", [(), TAUGHT], ids=["rewarded", "taught"])
async def test_a_run_killed_ahead_trains_what_was_finished_and_requests_only_the_rest(
    new_run: NewRun, agent, keys: tuple[str, ...]
):
    agent.change = taught
    keys = (*AHEAD, *keys)
    whole = new_run("whole", *keys)
    await fit(whole)
    first = new_run("run", *keys)
    await fit(first)
    for step in (2, 3, 4):
        shutil.rmtree(first.folder.checkpoints / f"global_step_{step}")
    agent.requests.clear()

    again = new_run("run", *keys)
    assert again.step == 1
    await fit(again)

    asked = [(request.step, request.sample.index) for request in agent.requests if not request.validation]
    assert sorted(asked) == [(2, 0), (2, 1), (3, 2), (3, 3)]
    assert trained(again) == trained(first)
    assert logprobs_of(again.learner) == logprobs_of(whole.learner)


async def test_what_was_finished_before_a_restart_is_as_stale_as_without_it(new_run: NewRun):
    """Three versions were published after the checkpoint of the first restart, and none after that of the second."""
    keys = (*AHEAD, "trackway.max_staleness=1")
    whole = new_run("whole", *keys)
    await fit(whole)
    first = new_run("run", *keys)
    await fit(first)
    for step in (2, 3, 4):
        shutil.rmtree(first.folder.checkpoints / f"global_step_{step}")
    second = new_run("run", *keys)
    update = second.update

    async def stopped(trajectories: Sequence[Trajectory], version: int) -> Metrics:
        second.stop.set()
        return await update(trajectories, version)

    second.update = stopped
    await fit(second)

    again = new_run("run", *keys)
    assert again.step == 2
    await fit(again)

    def staleness(run: Training) -> list[tuple[float, float]]:
        worst = "training/off_policy/trajectory_staleness_worst/max"
        return [(row.data[worst], row.data["rollouts/dropped_stale"]) for row in run.folder.rows()[1:]]

    assert staleness(again) == staleness(whole) == [(0, 0), (1, 0), (1, 0), (1, 0)]
    assert logprobs_of(again.learner) == logprobs_of(whole.learner)
    assert again.progress.versions.republications == ((7, 11), (12, 13))


async def test_weights_are_published_every_other_step(new_run: NewRun, agent):
    keys = ("async_training.trigger_parameter_sync_step=2", "trainer.total_training_steps=4")
    run = new_run("run", *keys)
    await fit(run)

    versions = {
        request.step: request.min_weight_version - agent.requests[0].min_weight_version
        for request in agent.requests
        if not request.validation
    }
    assert versions == {1: 0, 3: 1}
    assert [len(rollouts) for rollouts in trained(run)] == [4] * 4


BESIDE = (
    *("async_training.staleness_threshold=1", "async_training.trigger_parameter_sync_step=2", "trainer.test_freq=2"),
    *("trainer.total_training_steps=5", "trainer.save_freq=1"),
)
"""Weights are published after steps 2, 4 and 5, and validated."""


def alike(trajectory: Trajectory) -> Trajectory:
    """Every group of a run teaches the same, since a late one changes places with the next."""
    return trajectory.model_copy(update={"response_ids": [4, 9, 5, 7]})


def held(run: Training, step: int) -> asyncio.Event:
    """The validation of this step ends only once the event is set."""
    release, collect = asyncio.Event(), run.validation.rollouts.collect

    async def collected(batch: Sequence[Sample], of_step: int, *given: Any) -> list[Trajectory]:
        if of_step == step:
            await release.wait()
        return await collect(batch, of_step, *given)

    run.validation.rollouts.collect = collected  # pyright: ignore[reportAttributeAccessIssue]
    return release


async def waiting_for_validation(run: Training) -> "asyncio.Task[RunState]":
    """The run, when in step 4 it can do nothing more before the validation of step 2 is complete."""
    fitting = asyncio.create_task(fit(run))
    await async_until(
        lambda: run.step >= 4 and any("validation of the newest" in wait.waits_for for wait in run.waits.current())
    )
    return fitting


def validated_versions(agent) -> dict[int, int]:
    """Step -> version of its validation, counted from the run's first."""
    first = agent.requests[0].min_weight_version
    return {request.step: request.min_weight_version - first for request in agent.requests if request.validation}


async def test_a_validation_goes_on_beside_the_training_until_other_weights_are_published(new_run: NewRun, agent):
    agent.change = alike
    whole = new_run("whole", *BESIDE)
    assert await fit(whole) is RunState.FINISHED
    agent.requests.clear()
    agent.late_s = 0.1
    run = new_run("run", *BESIDE)
    release = held(run, 2)
    fitting = await waiting_for_validation(run)
    meanwhile = run.step, [row.step for row in run.folder.rows()], run.folder.info().step
    release.set()

    assert await fitting is RunState.FINISHED
    assert meanwhile == (4, [0, 1], 3)  # steps 3 and 4 were trained; step 4 ends with the publication
    assert [row.step for row in run.folder.rows()] == [0, 1, 2, 3, 4, 5]
    assert (validated(run), validated_versions(agent)) == ([0, 2, 4, 5], {0: 0, 2: 1, 4: 2, 5: 3})
    assert logprobs_of(run.learner) == logprobs_of(whole.learner)
    of_steps = [row.data for row in run.folder.rows()]
    assert ["timing_s/testing" in data for data in of_steps] == [True, False, True, False, True, True]
    assert of_steps[4]["timing_s/await_testing"] > 0
    assert run.folder.info().metrics[ACCURACY] == of_steps[5][ACCURACY]


@pytest.mark.parametrize("checkpoint", [2, 3, 4])
@pytest.mark.parametrize("killed", [True, False])
async def test_a_validation_that_was_cut_off_beside_the_training_is_done_with_its_weights_on_resume(
    new_run: NewRun, agent, killed: bool, checkpoint: int
):
    agent.change = alike
    whole = new_run("whole", *BESIDE)
    await fit(whole)
    agent.requests.clear()
    first = new_run("run", *BESIDE)
    held(first, 2)
    fitting = await waiting_for_validation(first)
    if killed:
        fitting.cancel()
        await asyncio.gather(fitting, return_exceptions=True)
    else:
        first.stop.set()
        assert await fitting is RunState.STOPPED
    later = [path for path in first.folder.checkpoints.glob("global_step_*") if int(path.name[12:]) > checkpoint]
    for path in later:
        shutil.rmtree(path)

    again = new_run("run", *BESIDE)
    assert again.step == min(checkpoint, 3 if killed else 4)
    assert await fit(again) is RunState.FINISHED

    assert [row.step for row in again.folder.rows()] == [0, 1, 2, 3, 4, 5]
    assert validated(again) == [0, 2, 4, 5]
    assert all("actor/pg_loss" in row.data for row in again.folder.rows()[1:])
    assert logprobs_of(again.learner) == logprobs_of(whole.learner)
    assert validated_versions(agent)[2] == (2 if checkpoint == 2 else 1)  # those of step 2 are published once more


async def test_a_validation_whose_weights_another_run_replaced_is_left_out_and_its_rows_are_written(
    new_run: NewRun, caplog: pytest.LogCaptureFixture
):
    first = new_run("run", *BESIDE)
    held(first, 2)
    fitting = await waiting_for_validation(first)
    fitting.cancel()
    await asyncio.gather(fitting, return_exceptions=True)
    new_run("other", "trainer.total_training_steps=1").publisher.publish()

    again = new_run("run", *BESIDE)
    assert await fit(again) is RunState.FINISHED

    assert ([row.step for row in again.folder.rows()], validated(again)) == ([0, 1, 2, 3, 4, 5], [0, 4, 5])
    assert "the validation of step 2 was cut off, and cannot be repeated" in caplog.text


async def test_a_validation_that_fails_beside_the_training_fails_the_run(new_run: NewRun, agent):
    error = ErrorBody(code=ErrorCode.ENGINE_FAILED, message="no such thing", retryable=False)
    agent.change = lambda made: made.model_copy(update={"error": error if made.tags.validation else None})
    run = new_run("run", *BESIDE, "trainer.val_before_train=false")

    with pytest.raises(TrackwayError, match="all 2 rollouts of the validation at step 2 failed"):
        await fit(run)
