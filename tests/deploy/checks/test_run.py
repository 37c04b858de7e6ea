"""Plans that do not lie: what is wrong on any machine, what this one lacks, and which of them ends a command with 2."""

import json
import os
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
from typer.testing import CliRunner

from tests.services.chat.families import FAMILIES
from trackway.agent import loop
from trackway.deploy.bundled import TINY_MODEL
from trackway.deploy.checks.run import check_run
from trackway.deploy.commands.training import app as training
from trackway.deploy.deployment.processes import ProcessRecord
from trackway.deploy.deployment.record import Deployment
from trackway.deploy.local.settings import UpSettings
from trackway.deploy.runs.prepare import prepare
from trackway.main_ppo import app as main_ppo
from trackway.run_config import RunConfig
from trackway.system.process import UserError
from trackway.trainer.data.row_files import write_rows
from trackway.trainer.run_state.folder import RunFolder
from trackway.trainer.service_urls import ServiceUrls
from trackway.wire.agent import RewardModel, Sample
from trackway.wire.chat import Message
from trackway.wire.errors import TrackwayError
from trackway.wire.trainer import RunState

pytestmark = pytest.mark.slow

CHECKOUT = Path(__file__).parents[3]
MODEL = TINY_MODEL
R = "actor_rollout_ref.rollout"
LOOP = f"{R}.agent.default_agent_loop"
CPU = "trackway.device=cpu"
ROW = Sample(
    data_source="openai/gsm8k",
    agent_name="tool_agent",
    prompt=[Message(role="user", content="What is 3 plus 4?")],
    reward_model=RewardModel(ground_truth="7"),
)
Changes = dict[int, dict[str, object]]


class Told(NamedTuple):
    """The end of a command, and everything it said in one line."""

    status: int
    text: str


def command(app: object, *words: str) -> Told:
    """As the command line ends it: a mistake is status 2."""
    result = CliRunner().invoke(app, [*words], env={"CUDA_VISIBLE_DEVICES": "", "COLUMNS": "200"})  # pyright: ignore[reportArgumentType]
    if isinstance(result.exception, UserError | TrackwayError):
        return Told(2, str(result.exception))
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Told(result.exit_code, " ".join(result.stdout.split()))


@pytest.fixture(autouse=True)
def bare_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "WANDB_ENTITY", "TRACKWAY_ENGINE_PYTHON"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TRACKWAY_UP_MIN_MEMORY_GB", "0.001")


@pytest.fixture(autouse=True)
def own_agents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the agents that other files of the suite register when they are imported."""
    ours = {name: agent for name, agent in loop._AGENTS.items() if agent.__module__.startswith("trackway.")}
    monkeypatch.setattr(loop, "_AGENTS", ours)


@pytest.fixture
def words(tmp_path: Path) -> Callable[..., list[str]]:
    """A run of 48 rows, some of them changed, that could start here."""

    def make(changes: Changes, *overrides: str) -> list[str]:
        rows = [ROW.model_copy(update={"extra_info": {"index": index}}) for index in range(48)]
        file = tmp_path / "train.parquet"
        write_rows(file, [row.model_copy(update=changes.get(index, {})) for index, row in enumerate(rows)])
        data = [f"data.train_files={file}", f"actor_rollout_ref.model.path={MODEL}", "trainer.experiment_name=plan"]
        return ["--config-name=tiny_demo", "--outputs", str(tmp_path / "outputs"), *data, *overrides]

    return make


def each(rows: tuple[int, ...], **changes: object) -> Changes:
    return dict.fromkeys(rows, changes)


WRONG: list[tuple[list[str], Changes, str]] = [
    (["actor_rollout_ref.actor.optim.lr=inf"], {}, "optim.lr: Input should be a finite number, got inf"),
    (["trainer.experiment_name=../../evil"], {}, "trainer.experiment_name: expected a run name of letters, digits"),
    (["data.train_batch_size=49"], {}, "expected at least data.train_batch_size=49 rows, got 48"),
    (["trainer.val_only=true"], {}, "trainer.val_only=true: expected rows in data.val_files, got none"),
    (["trainer.resume_mode=resume_path"], {}, "trainer.resume_from_path: expected .../global_step_<n>"),
    (["data.val_files='s3://bucket/rows.parquet'"], {}, "data.val_files: expected a file, got the URL s3://bucket"),
    (
        ["data.max_prompt_length=3"],
        {},
        "expected prompts of at most data.max_prompt_length=3 tokens, tool schemas included, got 48 of 48 rows",
    ),
    (
        ["data.max_prompt_length=3", "data.filter_overlong_prompts=true"],
        {},
        "expected prompts of at most data.max_prompt_length=3 tokens, tool schemas included, got none in 48 rows",
    ),
    (
        ["data.max_prompt_length=1", "actor_rollout_ref.model.path=Some/Model"],
        {},
        "expected prompts of at most data.max_prompt_length=1 tokens, got none in 48 rows, the shortest has 5 words",
    ),
    (
        [],
        each((4, 17, 30, 47), agent_name="my_agent"),
        "expected agent_name out of external, single_turn_agent, tool_agent, got 'my_agent' in 4 of 48 rows",
    ),
    (
        [],
        each((7,), data_source="lighteval/MATH"),
        "expected data_source out of openai/gsm8k, trackway/tiny_math, got 'lighteval/MATH' in 1 of 48 rows",
    ),
    (
        [],
        each((7,), extra_info={"index": 7, "tool_selection": ["abacus"]}),
        "expected tool_selection out of calc_gsm8k_reward, calculator, got 'abacus' in 1 of 48 rows",
    ),
    (
        ["trackway.tools=[abacus]"],
        {},
        "trackway.tools: expected tools out of calc_gsm8k_reward, calculator, got 'abacus'",
    ),
    (
        [f"{R}.multi_turn.enable=false", f"{LOOP}=mine"],
        each((0, 1), agent_name=None),
        f"{LOOP}: expected one of external, single_turn_agent, tool_agent, got 'mine', "
        "the loop of 2 rows without agent_name",
    ),
    (
        [],
        each((2,), prompt=[Message(role="user", content="word " * 200)]),
        "got 1 of 48 rows with up to",
    ),
]
MISSING: list[tuple[list[str], str]] = [
    (["actor_rollout_ref.model.path=/nope"], "expected a model's folder or an id on the Hugging Face Hub, got /nope"),
    (["data.train_files=/nowhere.parquet"], "data.train_files: expected a dataset file at /nowhere.parquet"),
    ([f"{R}.trace.backend=weave"], "needs W&B's API key: set WANDB_API_KEY in the environment of this command"),
    (["trackway.device=cuda"], "trackway.device=cuda: expected a GPU, got none"),
    (["trainer.nnodes=2"], "trainer.nnodes: expected 1 on this machine, got 2"),
    (
        [f"{R}.multi_turn.tool_config_path=/nowhere.yaml"],
        "multi_turn.tool_config_path: expected a file, got /nowhere.yaml",
    ),
    (
        ["trainer.resume_mode=resume_path", "trainer.resume_from_path=/nowhere/global_step_1"],
        "trainer.resume_from_path: expected a checkpoint, .../global_step_<n> with a state.json, got /nowhere",
    ),
]


@pytest.mark.parametrize(("overrides", "changes", "said"), WRONG)
def test_what_is_wrong_on_any_machine_ends_a_plan_with_status_2(words, overrides, changes: Changes, said: str) -> None:
    told = command(main_ppo, *words(changes, *overrides), "--dry-run")

    assert told.status == 2
    assert said in told.text


@pytest.mark.parametrize(("overrides", "said"), MISSING)
def test_what_only_this_machine_lacks_is_listed_and_refused_by_a_preflight(words, overrides, said: str) -> None:
    checked = command(main_ppo, *words({}, *overrides), "--preflight")

    assert checked.status == 2
    assert said in checked.text.partition("missing here")[2]


def test_what_only_this_machine_lacks_is_listed_and_not_refused_by_a_plan(words) -> None:
    overrides, said = [f"{R}.trace.backend=weave"], "needs W&B's API key"
    planned = command(main_ppo, *words({}, *overrides), "--dry-run")

    assert planned.status == 0
    assert said in planned.text.partition("missing here")[2]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        *(found for found in MISSING if "/no" in found[0][0]),
        (["data.val_files=/nowhere.parquet"], "data.val_files: expected a dataset file at /nowhere.parquet, got none"),
        (["actor_rollout_ref.model.path=modle"], "or an id on the Hugging Face Hub, got modle; correct the path"),
        (["custom_reward_function.path=/nowhere.py"], "path: expected a Python file, got '/nowhere.py'; correct the"),
        (["trackway.code_path=/nowhere"], "trackway.code_path: expected a folder, got /nowhere; correct the path"),
    ],
)
def test_a_path_that_leads_nowhere_ends_a_plan_with_status_2(words, overrides: list[str], said: str) -> None:
    planned = command(main_ppo, *words({}, *overrides), "--dry-run")

    assert planned.status == 2
    assert said in planned.text.partition("missing here")[2]


@pytest.mark.parametrize("mode", ["--dry-run", "--preflight"])
def test_tools_for_a_template_without_them_are_wrong(mode: str, words, tmp_path: Path) -> None:
    model = tmp_path / "gemma"
    shutil.copytree(MODEL, model)
    (model / "chat_template.jinja").write_text(FAMILIES["gemma"].template)

    told = command(main_ppo, *words({}, f"actor_rollout_ref.model.path={model}"), mode)

    reason = (
        "data.train_files: expected a chat template that shows tools and their results, got one that leaves out the "
        "schemas of tools and rejects the results of tools (Conversation roles must alternate "
    )
    assert told.status == 2
    assert reason in told.text.partition("wrong on any machine")[2]


def test_a_plan_lists_keys_that_ask_for_what_trackway_lacks_and_a_run_refuses_them_all(words, tmp_path: Path) -> None:
    keys = ["model_engine=megatron", "algorithm.use_pf_ppo=true", "reward.reward_manager.name=batch"]

    planned, checked, trained = (
        command(main_ppo, *words({}, *keys), *more) for more in (["--dry-run"], ["--preflight"], [])
    )
    as_json = json.loads(command(main_ppo, *words({}, *keys), "--dry-run", "--json").text)

    engine = "model_engine: expected dp, got megatron; the learner is PyTorch's FSDP2"
    pf_ppo = "algorithm.use_pf_ppo: expected False, got True; PF-PPO is not implemented"
    batch = (
        "reward.reward_manager.name: expected a manager that scores each response by itself, got batch, whose function"
    )
    assert (planned.status, checked.status, trained.status) == (0, 2, 2)
    for told in (planned, checked):
        listed = told.text.partition("missing here")[2]
        assert all(listed.count(said) == 1 for said in (engine, pf_ppo, batch))
        assert listed.endswith(
            "without --dry-run this command refuses to start, because Trackway lacks what these ask for: "
            "algorithm.use_pf_ppo, model_engine, reward.reward_manager.name"
        )
    assert all(trained.text.count(said) == 1 for said in (engine, pf_ppo, batch))
    assert (as_json["starts_here"], as_json["wrong"], as_json["missing_here"]) == (False, [], [])
    assert [(key["key"], key["expected"], key["got"]) for key in as_json["unsupported"][:2]] == [
        ("algorithm.use_pf_ppo", "False", "True"),
        ("model_engine", "dp", "megatron"),
    ]
    assert not (tmp_path / "outputs").exists()


def test_a_plan_with_keys_that_trackway_lacks_still_fails_for_what_is_wrong(words) -> None:
    told = command(main_ppo, *words({}, "model_engine=megatron", "data.train_batch_size=49"), "--dry-run")

    assert told.status == 2
    assert "model_engine: expected dp, got megatron" in told.text.partition("missing here")[2]
    assert "expected at least data.train_batch_size=49 rows" in told.text.partition("wrong on any machine")[2]


def test_a_run_that_can_start_here_passes_both_and_nothing_is_written(words, tmp_path: Path) -> None:
    gpus = ["trainer.n_gpus_per_node=8", f"{R}.name=sglang", f"{R}.tensor_model_parallel_size=2"]

    planned = command(main_ppo, *words({}, *gpus), "--dry-run")
    checked = command(main_ppo, *words({}, *gpus), "--preflight")

    assert (planned.status, checked.status) == (0, 0)
    assert "wrong on any machine" not in checked.text and "not checked" not in checked.text
    assert "missing here, not required - actor_rollout_ref.rollout.name: sglang requested, this machine has no GPU" in (
        checked.text
    )
    assert not (tmp_path / "outputs").exists()


def test_the_plan_of_verls_script_for_eight_gpus_is_right_on_a_machine_that_has_nothing(tmp_path: Path) -> None:
    script = (Path(__file__).parents[2] / "e2e" / "reproduce.sh").read_text()
    for given, shell in (("\\\n", " "), ("$HOME", str(tmp_path)), ("$PROJECT_DIR", str(CHECKOUT))):
        script = script.replace(given, shell)
    arguments = shlex.split(script.partition("main_ppo")[2].partition('"$@"')[0])
    config = f"--config-path={CHECKOUT}/examples/sglang_multiturn/config"
    words = [config if word.startswith("--config-path") else word for word in arguments]

    told = command(main_ppo, *words, "--outputs", str(tmp_path / "outputs"), "--dry-run")

    assert told.status == 2, told.text
    missing, _, replaced = told.text.partition("missing here")[2].partition("missing here, not required")
    for said in ("WANDB_API_KEY", "data/gsm8k/train.parquet", "data/gsm8k/test.parquet"):
        assert said in missing
    assert "Qwen/Qwen2.5-3B-Instruct is not in this machine's" in replaced.partition("not checked")[2]
    assert "trainer.n_gpus_per_node: 8 requested, this machine has no GPU" in replaced
    assert "wrong on any machine" not in told.text


def test_a_run_is_refused_with_every_problem_before_anything_starts(words, tmp_path: Path) -> None:
    overrides = ["actor_rollout_ref.model.path=/nope", "trainer.val_only=true", f"{R}.trace.backend=weave"]

    told = command(main_ppo, *words(each((3,), agent_name="nobody"), *overrides))

    assert told.status == 2
    reasons = told.text.splitlines()
    assert reasons[0] == "5 problems prevent this run from starting"
    for said in ("'nobody' in 1 of 48 rows", "val_only", "missing here: actor_rollout_ref.model.path", "WANDB_API_KEY"):
        assert sum(said in reason for reason in reasons) == 1, reasons
    assert not (tmp_path / "outputs").exists()


def test_a_plan_names_the_updates_of_a_value_model(words) -> None:
    value_model = ["algorithm.adv_estimator=gae", "trainer.critic_warmup=5", "critic.ppo_mini_batch_size=5"]

    told = command(main_ppo, *words({}, *value_model), "--dry-run")

    assert "value model 3 updates a step, each of 40 trajectories; the policy is updated from step 5 on" in told.text
    assert "value model" not in command(main_ppo, *words({}), "--dry-run").text


@pytest.mark.parametrize(
    ("overrides", "ends"),
    [
        ([], {"services": "ready", "rows": "ready", "prompts": "ready", "tokenizer": "ready"}),
        (["data.val_files=/nope.parquet"], {"rows": "with problems", "tokenizer": "ready"}),
        (["actor_rollout_ref.model.path=/nope"], {"rows": "ready", "tokenizer": "with problems"}),
        (["actor_rollout_ref.model.path=Some/Model"], {"rows": "ready", "tokenizer": "not checked"}),
    ],
)
def test_each_part_of_a_check_ends_as_it_went(words, overrides: list[str], ends: dict[str, str]) -> None:
    states: dict[str, str] = {}
    _config_name, _outputs, outputs, *keys = words({}, *overrides)
    run = prepare(keys, None, "tiny_demo", UpSettings(outputs=Path(outputs)))

    check_run(run, load=False, report=lambda name, state: states.update({name: state}))

    assert {name: states[name] for name in ends} == ends


def test_a_plan_and_a_preflight_are_json_for_programs(words) -> None:
    told = command(
        main_ppo, *words(each((3,), agent_name="nobody")), "actor_rollout_ref.model.path=/nope", "--dry-run", "--json"
    )

    report = json.loads(told.text)
    assert (told.status, report["starts_here"], len(report["wrong"]), len(report["not_found"])) == (2, False, 1, 1)
    assert report["plan"]["prompts"] == 12
    assert "the length of prompts: the tokenizer of /nope cannot be used on this machine" in report["not_checked"][0]


def test_scorers_and_agents_of_ones_own_are_loaded_as_the_services_load_them(
    words, tmp_path: Path, monkeypatch
) -> None:
    (tmp_path / "own_scorers.py").write_text(
        "from trackway.wire.reward import ScorerInfo\n"
        "class Maths:\n"
        "    info = ScorerInfo(name='m', data_sources=['my/maths'], methods=['strict'], description='')\n"
        "    async def score(self, request, method): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("TRACKWAY_EXTRA_SCORERS", '["own_scorers:Maths"]')
    mine = words(each((3,), data_source="my/maths"))

    served = command(main_ppo, *mine, "--dry-run")
    monkeypatch.setenv("TRACKWAY_EXTRA_SCORERS", '["no_such_package:Maths"]')
    absent = command(main_ppo, *mine, "--dry-run")
    (tmp_path / "exiting_scorers.py").write_text("import sys\nsys.exit(0)\n")
    monkeypatch.setenv("TRACKWAY_EXTRA_SCORERS", '["exiting_scorers:Maths"]')
    exiting = command(main_ppo, *mine, "--dry-run")
    monkeypatch.setenv("TRACKWAY_EXTRA_SCORERS", '["own_scorers:Maths", "own_scorers:Maths"]')
    twice = command(main_ppo, *mine, "--dry-run")

    assert (served.status, absent.status, exiting.status, twice.status) == (0, 0, 2, 2)
    assert "expected one scorer for data source 'my/maths', got m and m; give one of them other" in twice.text
    assert "my/maths" not in served.text
    assert "setting extra_scorers, 'exiting_scorers:Maths': it called sys.exit(0) on import" in exiting.text
    assert "missing here - scorers: ModuleNotFoundError: No module named 'no_such_package'" in absent.text


def test_an_mcp_server_is_asked_for_its_tools_only_by_a_preflight(words, tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text(
        "from mcp.server import MCPServer\n"
        "server = MCPServer('abaci')\n"
        "@server.tool()\n"
        "def abacus(beads: int) -> str: return str(beads)\n"
        "server.run('stdio')\n"
    )
    config = tmp_path / "tools.yaml"
    config.write_text(json.dumps({"tools": [{"mcp": {"mcp_servers_config_path": "servers.json"}}]}))
    mine = words(
        each((3,), extra_info={"index": 3, "tool_selection": ["abacus", "slide_rule"]}),
        f"{R}.multi_turn.tool_config_path={config}",
    )

    def told(program: str, option: str) -> Told:
        abaci = {"command": program, "args": [str(tmp_path / "server.py")]}
        (tmp_path / "servers.json").write_text(json.dumps({"mcpServers": {"abaci": abaci}}))
        return command(main_ppo, *mine, option)

    planned, checked = told(sys.executable, "--dry-run"), told(sys.executable, "--preflight")
    absent = told("/no/such/program", "--preflight")

    assert (planned.status, checked.status, absent.status) == (0, 2, 2)
    assert "known only to the running MCP server" in planned.text.partition("not checked")[2]
    assert "expected tool_selection out of abacus, got 'slide_rule' in 1 of 48 rows" in checked.text
    assert "tools.yaml, entry 1 does not start: " in absent.text.partition("missing here")[2]


@pytest.fixture
def running(elsewhere, tmp_path: Path) -> Deployment:
    """The record of services that this process started."""
    mine = ProcessRecord(name="ray", pid=os.getpid(), started=psutil.Process().create_time(), log=tmp_path / "log")
    applications = [{"name": name} for name in ("rollout", "agent", "tools", "reward", "trainer")]
    deployment = Deployment(
        base_url=elsewhere.url,
        dashboard_url="",
        mlflow_uri="http://mlflow",
        outputs=tmp_path / "outputs",
        processes=[mine],
        serve_config={"applications": applications},
    )
    deployment.save()
    return deployment


def test_services_that_run_are_asked_what_they_serve_and_the_run_is_not_even_sent(
    words, running: Deployment, elsewhere
) -> None:
    mine = words(each((4, 17, 30, 47), agent_name="my_agent"), f"{R}.trace.backend=null")

    planned, checked, trained = (
        command(training, "train", *mine, *more) for more in (["--dry-run"], ["--preflight"], [])
    )

    for told in (planned, checked, trained):
        assert told.status == 2
        expected = "expected agent_name out of external, single_turn_agent, tool_agent, got 'my_agent' in 4 of 48 rows"
        assert expected in told.text
    assert [*elsewhere.volume.glob("plan*")] == []
    assert command(training, "train", *words({}, f"{R}.trace.backend=null"), "--preflight").status == 0


def test_services_that_run_must_read_as_long_as_the_runs_model_and_lack_no_key(words, running: Deployment) -> None:
    longer = words({}, f"{R}.trace.backend=null", "+actor_rollout_ref.model.override_config.max_position_embeddings=99")
    lacking = [*longer, "algorithm.use_pf_ppo=true"]

    planned, checked = (command(training, "train", *longer, more) for more in ("--dry-run", "--preflight"))
    listed, refused = command(training, "train", *lacking, "--dry-run"), command(training, "train", *lacking)

    want = "expected a rollout service with max_position_embeddings: 99, got none; stop the services"
    assert (planned.status, checked.status) == (0, 2)
    assert want in planned.text and want in checked.text
    assert (listed.status, refused.status) == (0, 2)
    assert "algorithm.use_pf_ppo: expected False, got True" in listed.text.partition("missing here")[2]
    assert refused.text == "algorithm.use_pf_ppo: expected False, got True; PF-PPO is not implemented; leave it out"


def test_a_run_that_the_rollout_service_cannot_hold_is_told_so_by_a_plan(
    words, running: Deployment, elsewhere, tmp_path: Path
) -> None:
    other = shutil.copytree(TINY_MODEL, tmp_path / "other")
    file = other / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_hidden_layers": 1}))
    mine = words({}, f"{R}.trace.backend=null")
    active = [elsewhere.hold(f"active-{number}", RunConfig(), RunState.RUNNING) for number in range(4)]
    for folder in active[1:]:
        folder.update(policy=folder.name)

    beside = command(training, "train", *mine, "--dry-run")
    active[3].move(RunState.FAILED)
    last = command(training, "train", *mine, f"actor_rollout_ref.model.path={other}", "--dry-run")
    for folder in active[:3]:
        folder.move(RunState.FAILED)

    place = "place for one more policy beside active-"
    assert (
        "got max_policies=4; raise max_policies, or wait until a run ends" in beside.text.partition("missing here")[2]
    )
    assert place in beside.text and place not in last.text
    assert "num_hidden_layers 1 instead of 2 in" in last.text.partition("missing here")[2]


def test_gpus_of_a_run_on_services_of_a_machine_without_any_are_missing_unless_it_trains_on_the_cpu(
    words, running: Deployment
) -> None:
    asked = words({}, f"{R}.trace.backend=null", "trainer.n_gpus_per_node=8")
    told = [command(training, "train", *asked, more, "--dry-run").text for more in ("trackway.seed=1", CPU)]

    said = "trainer.n_gpus_per_node=8: expected a GPU for trackway.device=auto, got none; set trackway.device=cpu"
    assert [said in text for text in told] == [True, False]


def test_a_service_that_does_not_answer_is_unknown_to_a_plan_and_missing_to_a_preflight(
    words, running: Deployment, elsewhere
) -> None:
    elsewhere.away = {"reward"}
    mine = words({}, f"{R}.trace.backend=null")

    planned = command(training, "train", *mine, "--dry-run")
    checked = command(training, "train", *mine, "--preflight")

    assert (planned.status, checked.status) == (0, 2)
    assert "the reward service: " in planned.text.partition("not checked")[2]
    assert "the reward service: " in checked.text.partition("missing here")[2]


def test_a_plan_of_a_run_to_resume_is_refused_and_resumes_nothing(running: Deployment) -> None:
    told = command(training, "train", "--resume", "plan", "--dry-run", "--outputs", str(running.outputs))

    assert told == (2, "--dry-run and --preflight: expected a new run, got --resume; remove one of the options")


@pytest.mark.parametrize("words", [["--config", "other.yaml"], ["--config-name", "grpo"]])
def test_a_run_that_running_services_resume_takes_no_other_configuration(running: Deployment, words: list[str]) -> None:
    told = command(training, "train", "--resume", "first", *words, "--outputs", str(running.outputs))

    assert told == (
        2,
        "--resume: expected no --config and no --config-name, since first goes on with its own configuration, got "
        f"{words[1]}; give the keys to change as key=value",
    )


def test_a_name_that_is_taken_or_cannot_be_is_told_before_anything_is_sent(words, running: Deployment) -> None:
    mine = words({}, f"{R}.trace.backend=null", "trainer.resume_mode=disable")
    RunFolder(running.outputs / "plan").create(RunConfig(), ServiceUrls.model_construct())

    taken = command(training, "train", *mine, "--dry-run")
    other_run = command(training, "train", *mine, "--run", "other", "--dry-run")
    evil = command(training, "train", *mine, "--run", "../../evil")

    assert (taken.status, other_run.status, evil.status) == (0, 0, 2)
    said = f"run 'plan' is starting in {running.outputs}; give another trainer.experiment_name"
    assert said in taken.text.partition("missing here")[2] and "is starting" not in other_run.text
    assert evil.text.startswith("--run: expected a run name of letters, digits")


def test_settings_of_a_start_and_of_services_are_numbers_that_can_be(words, monkeypatch) -> None:
    monkeypatch.setenv("TRACKWAY_UP_START_TIMEOUT_S", "inf")
    start = command(main_ppo, *words({}), "--dry-run")
    monkeypatch.delenv("TRACKWAY_UP_START_TIMEOUT_S")
    monkeypatch.setenv("TRACKWAY_CALL_TIMEOUT_S", "nan")
    service = command(main_ppo, *words({}), "--dry-run")

    assert start == (2, "TRACKWAY_UP_START_TIMEOUT_S: Input should be a finite number, got 'inf'")
    assert (service.status, "tools: setting call_timeout_s: Input should be a finite number" in service.text) == (
        2,
        True,
    )


def test_rows_and_model_of_other_machines_are_left_to_the_trainer_there(there: Deployment) -> None:
    files = ["data.train_files=/volume/train.parquet", "actor_rollout_ref.model.path=/volume/model"]
    mine = ["--config-name=tiny_demo", "--outputs", str(there.outputs), *files, f"{R}.trace.backend=null"]

    fine = command(training, "train", *mine, "--preflight")
    wrong = command(training, "train", *mine, "trackway.tools=[abacus]", "--preflight")

    assert (fine.status, wrong.status) == (0, 2)
    assert "rows: /volume/train.parquet are on the services' machines" in fine.text.partition("not checked")[2]
    assert "trackway.tools: expected tools out of calc_gsm8k_reward, calculator, got 'abacus'" in wrong.text
