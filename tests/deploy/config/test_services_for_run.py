"""From verl's words about engines and GPUs to a Serve config, for machines with and without GPUs."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from trackway.deploy.bundled import CPU_CONFIG, TINY_MODEL
from trackway.deploy.config import serve_config, services_for_run
from trackway.deploy.config.services_for_run import RunServices, decided_already, services_for
from trackway.deploy.local.up import shared_gpus
from trackway.rollout.settings import RolloutSettings
from trackway.run_config import compose
from trackway.tools.settings import ToolsSettings

R = "actor_rollout_ref.rollout"
SCRIPT = [
    f"{R}.name=sglang",
    f"{R}.tensor_model_parallel_size=2",
    f"{R}.gpu_memory_utilization=0.6",
    "trainer.n_gpus_per_node=8",
    "trainer.nnodes=1",
]


@pytest.fixture(autouse=True)
def no_engine_of_the_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TRACKWAY_ENGINE_PYTHON", "TRACKWAY_ENGINE_URL"):
        monkeypatch.delenv(name, raising=False)


def made(gpus: int, *words: str, **rollout_args: object) -> RunServices:
    base = serve_config.load(CPU_CONFIG)
    if rollout_args:
        base = serve_config.with_options(base, "rollout", rollout_args)
    return services_for(compose([*words]), gpus, base)


def args(services: RunServices, service: str = "rollout") -> dict[str, Any]:
    return serve_config.args_of(services.serve_config, service)


def rollout_deployment(services: RunServices) -> dict[str, Any]:
    [deployment] = services.serve_config["applications"][0]["deployments"]
    return deployment


def told(services: RunServices) -> dict[str, tuple[str, str, str]]:
    return {
        decision.key.rpartition(".")[2]: (decision.asked, decision.got, decision.reason)
        for decision in services.decisions
    }


def test_eight_gpus_make_four_replicas_of_two_that_sleep_while_the_learner_works() -> None:
    services = made(8, *SCRIPT)

    assert (services.engine, services.replicas) == ("sglang", 4)
    settings = RolloutSettings(**args(services))
    assert (settings.engine, settings.tensor_parallel_size, settings.enable_sleep) == ("sglang", 2, True)
    assert (settings.gpu_memory_utilization, settings.max_num_seqs) == (0.6, 256)
    deployment = rollout_deployment(services)
    assert (deployment["num_replicas"], deployment["max_ongoing_requests"]) == (4, 512)
    assert deployment["ray_actor_options"] == {"num_cpus": 0.5, "num_gpus": 2}
    assert told(services)["n_gpus_per_node"] == ("8", "4 rollout replicas", "8 GPUs / 2 each = 4")


def test_a_number_of_gpus_that_the_replicas_do_not_divide_leaves_some_idle_and_says_so() -> None:
    services = made(8, *SCRIPT, f"{R}.tensor_model_parallel_size=3")

    assert services.replicas == 2
    assert told(services)["n_gpus_per_node"][2] == "8 GPUs / 3 each = 2; 2 stay idle, as 3 does not divide 8"


def test_replicas_and_the_learners_ranks_take_all_gpus_of_the_machine_unless_their_number_is_given() -> None:
    all_gpus, alone = made(8, f"{R}.name=vllm"), made(8, f"{R}.name=vllm", "trackway.learner_ranks=1")
    some = made(8, f"{R}.name=vllm", "trainer.n_gpus_per_node=2")

    assert [(run.replicas, run.config.placement.ranks) for run in (all_gpus, alone, some)] == [(8, 8), (8, 1), (2, 2)]
    assert [run.config.idle_gpus.partition(";")[0] for run in (all_gpus, alone)] == ["", "1 of 8 GPUs trains"]


def test_engines_that_keep_their_memory_do_not_sleep() -> None:
    assert args(made(2, *SCRIPT, "trainer.n_gpus_per_node=2", f"{R}.free_cache_engine=False"))["enable_sleep"] is False


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "trainer.n_gpus_per_node: expected 1 to 4, the GPUs of this machine, got 8"),
        (
            ["trainer.n_gpus_per_node=null", f"{R}.tensor_model_parallel_size=8"],
            "tensor_model_parallel_size: expected at most the run's 4 GPUs, got 8",
        ),
        (
            ["trainer.nnodes=2"],
            r"trainer.nnodes: expected 1 on this machine, got 2; several machines need a Ray cluster",
        ),
    ],
)
def test_what_would_be_another_run_is_missing_here(words: list[str], message: str) -> None:
    missing = made(4, *SCRIPT, *words).missing[0]
    assert re.search(message, missing)


@pytest.mark.parametrize(
    ("gpus", "engine", "got"),
    [(1, "sglang", "engine sglang"), (0, "vllm", "this machine has no GPU"), (1, "torch", "engine torch")],
)
def test_weights_cannot_be_taken_from_the_learners_gpu_everywhere(gpus: int, engine: str, got: str) -> None:
    missing = made(
        gpus, "trackway.weights_transport=ipc", f"{R}.name={engine}", engine_python="/opt/bin/python"
    ).missing
    assert missing == [
        f"trackway.weights_transport=ipc: expected the engine vllm on the learner's GPU, got {got}; set "
        "rollout.name=vllm on a machine with a GPU, or leave the key out"
    ]


@pytest.mark.parametrize(
    ("engine", "words", "told"),
    [
        ("sglang", [f"{R}.seed=7"], ["7"]),
        ("sglang", [f"{R}.seed=7", f"+{R}.engine_kwargs.sglang.enable_deterministic_inference=true"], []),
        ("sglang", [], []),
        ("vllm", [f"{R}.seed=7"], []),
    ],
)
def test_a_seed_that_sglang_ignores_is_told(engine: str, words: list[str], told: list[str]) -> None:
    services = made(1, f"{R}.name={engine}", *words, engine_python="/opt/bin/python")

    found = [decision for decision in services.decisions if decision.key == f"{R}.seed"]
    assert [decision.asked for decision in found] == told
    assert {decision.got for decision in found} <= {"no effect"}


def test_a_server_gets_the_float32_head_of_its_run_and_the_embedded_engine_has_none() -> None:
    vllm = made(1, "trackway.float32_head=true", f"{R}.name=vllm", engine_python="/opt/bin/python")
    torch = made(1, "trackway.float32_head=true", f"{R}.name=torch")

    assert (args(vllm)["float32_head"], "float32_head" in args(torch)) == (True, False)
    found = [decision.got for decision in torch.decisions if decision.key == "trackway.float32_head"]
    assert found == ["only in the learner"]
    assert "float32_head" not in args(made(1, f"{R}.name=vllm", engine_python="/opt/bin/python"))


def test_weights_of_the_learners_gpu_reach_one_replica_only() -> None:
    words = ("trackway.weights_transport=ipc", f"{R}.name=vllm")
    assert made(4, *words, engine_python="/opt/bin/python").missing == [
        "trackway.weights_transport=ipc: expected the engine vllm on the learner's GPU, got 4 replicas; set "
        "trainer.n_gpus_per_node=1, or leave the key out"
    ]
    assert made(4, *words, "trainer.n_gpus_per_node=1", engine_python="/opt/bin/python").missing == []


def test_services_of_a_run_take_weights_as_it_offers_them() -> None:
    services = made(1, "trackway.weights_transport=ipc", f"{R}.name=vllm", engine_python="/opt/bin/python")
    assert (services.missing, args(services)["weights_transport"]) == ([], "ipc")
    assert "weights_transport" not in args(made(1, f"{R}.name=vllm"))


def test_without_a_gpu_the_embedded_engine_takes_over_in_plain_words() -> None:
    services = made(0, *SCRIPT, f"{R}.free_cache_engine=True")

    assert (services.engine, services.replicas, args(services)) == (
        "torch",
        None,
        {"max_num_seqs": 128, "engine": "torch", "enable_sleep": True},
    )
    why = "this machine has no GPU"
    assert told(services) == {
        "name": ("sglang", "torch, the embedded engine", why),
        "tensor_model_parallel_size": ("2", "one replica of one process", why),
        "n_gpus_per_node": ("8", "0", why),
        "gpu_memory_utilization": ("0.6", "no effect", "the torch engine has no such setting"),
        "free_cache_engine": ("True", "on", "the weights of the engine are in a file while the learner computes"),
    }
    assert services.config.trainer.n_gpus_per_node is None


@pytest.mark.parametrize("free", ["null", "false"])
def test_the_embedded_engine_sleeps_only_when_asked_to(free: str) -> None:
    assert "enable_sleep" not in args(made(1, f"{R}.name=torch", f"{R}.free_cache_engine={free}"))
    assert args(made(1, f"{R}.name=torch", f"{R}.free_cache_engine=true"))["enable_sleep"] is True


def test_vllm_on_a_cpu_keeps_its_memory_and_the_learner_does_not_ask() -> None:
    words = [f"{R}.name=vllm", f"{R}.free_cache_engine=true"]
    started = made(0, *words, engine_python="/opt/bin/python", enable_sleep=True)
    elsewhere = made(0, *words, engine="vllm", engine_url="http://gpu:8000", enable_sleep=True)

    reason = "vllm keeps its memory on a CPU, where it ignores calls to sleep"
    assert told(started)["free_cache_engine"] == ("True", "no effect", reason)
    assert (args(started)["enable_sleep"], args(elsewhere)["enable_sleep"]) == (False, True)
    asks = [made.config.actor_rollout_ref.rollout.free_cache_engine for made in (started, elsewhere)]
    assert asks == [None, True]


def test_an_engine_of_the_users_own_frees_no_memory_and_the_learner_does_not_ask() -> None:
    services = made(0, f"{R}.free_cache_engine=true", f"{R}.multi_stage_wake_up=true", engine="mine:Engine")
    nothing = ("True", "no effect", "the mine:Engine engine has no such setting")
    assert (told(services)["free_cache_engine"], told(services)["multi_stage_wake_up"]) == (nothing, nothing)
    assert services.config.actor_rollout_ref.rollout.free_cache_engine is None  # or the learner would ask for it


def test_arguments_of_the_engine_follow_those_of_the_file_on_its_command_line() -> None:
    words = [
        f"{R}.name=vllm",
        f"++{R}.engine_kwargs.vllm={{swap_space:8,async_scheduling:true,enforce_eager:false,sizes:[1,2],none:null}}",
        f"++{R}.engine_kwargs.vllm.compilation_config.cudagraph_mode=FULL",
        f"++{R}.engine_kwargs.sglang.attention_backend=flashinfer",
    ]

    services = made(1, *words, engine="vllm", engine_args=["--first"])

    assert args(services)["engine_args"] == [
        *("--first", "--swap-space", "8", "--async-scheduling", "--sizes", "1", "2"),
        *("--compilation-config", '{"cudagraph_mode": "FULL"}'),
    ]
    asked, got, reason = told(services)["sglang"]
    assert (asked, got, reason) == ("{'attention_backend': 'flashinfer'}", "no effect", "the engine is vllm")
    assert "engine_args" not in args(made(0, *words))


def test_variables_of_the_chat_template_are_the_agent_services() -> None:
    services = made(0, "+data.apply_chat_template_kwargs.enable_thinking=false")

    assert args(services, "agent")["chat_template_kwargs"] == {"enable_thinking": False}


def test_a_build_of_vllm_for_the_cpu_is_used_when_one_is_named() -> None:
    services = made(0, f"{R}.name=vllm", f"{R}.enforce_eager=True", engine_python="/opt/vllm/bin/python")

    assert args(services) == {
        "engine": "vllm",
        "engine_python": "/opt/vllm/bin/python",
        "device": "cpu",
        "enforce_eager": True,
        "max_num_seqs": 256,
    }
    assert made(0, f"{R}.name=vllm").engine == "torch"


def test_a_serve_config_for_the_same_engine_keeps_its_own_numbers() -> None:
    services = made(2, f"{R}.name=vllm", engine="vllm", max_num_seqs=32)

    assert (args(services)["max_num_seqs"], rollout_deployment(services)["max_ongoing_requests"]) == (32, 64)


def test_every_engine_key_reaches_its_setting() -> None:
    words = [f"{R}.{word}" for word in ("enable_prefix_caching=False", "dtype=bfloat16", "max_num_seqs=7")]

    given = args(made(2, f"{R}.name=vllm", f"{R}.max_model_len=900", *words))

    settings = RolloutSettings(**given)
    assert (settings.prefix_caching, settings.dtype) == (False, "bfloat16")
    assert (settings.max_num_seqs, settings.max_model_len, settings.tensor_parallel_size) == (7, 900, 1)


def test_engines_read_as_long_as_the_runs_model() -> None:
    longest = "+actor_rollout_ref.model.override_config.max_position_embeddings=900"

    for engine in ("vllm", "torch"):
        assert RolloutSettings(**args(made(2, f"{R}.name={engine}", longest))).max_position_embeddings == 900
        assert "max_position_embeddings" not in args(made(2, f"{R}.name={engine}"))


def test_a_server_is_started_for_the_adapters_of_a_run_that_publishes_them_alone() -> None:
    lora, merge = "actor_rollout_ref.model.lora_rank=12", "actor_rollout_ref.model.lora.merge=True"

    assert args(made(2, f"{R}.name=vllm", lora))["max_lora_rank"] == 12
    for words in ((f"{R}.name=vllm", lora, merge), (f"{R}.name=vllm",), (f"{R}.name=torch", lora)):
        assert "max_lora_rank" not in args(made(2, *words))


def test_lengths_beyond_what_an_engine_takes_by_itself_make_it_longer() -> None:
    assert args(made(0, "data.max_prompt_length=3000", "data.max_response_length=2000"))["max_model_len"] == 5000
    assert "max_model_len" not in args(made(0, "data.max_prompt_length=3000", "data.max_response_length=1096"))


def test_lengths_beyond_the_models_positions_are_missing_before_the_embedded_engine_starts() -> None:
    model, longer = f"actor_rollout_ref.model.path={TINY_MODEL}", ["data.max_response_length=4000"]
    override = "+actor_rollout_ref.model.override_config.max_position_embeddings"
    expected = (
        "max_model_len: expected at most {}, the most that the model's max_position_embeddings allow, got {}; lower it"
    )

    for words, said in (
        ([*longer], expected.format(1024, 4512)),
        ([*longer, f"{override}=4511"], expected.format(4511, 4512)),
        ([f"{R}.max_model_len=1025"], expected.format(1024, 1025)),
    ):
        [missing] = made(0, model, *words).missing
        assert missing.startswith(said)
    for words in ([*longer, f"{override}=4512"], [*longer, f"{R}.name=vllm"], [f"{R}.max_model_len=1024"], []):
        assert made(0, model, *words, engine_python="/opt/bin/python").missing == []


def test_a_run_that_says_nothing_leaves_replicas_to_the_serve_config_and_says_which_gpus_are_idle() -> None:
    services = made(8)

    assert (services.replicas, rollout_deployment(services)["num_replicas"]) == (None, 1)
    idle = ("", "1 rank, on GPU 0", "set it to use the 8 GPUs of this machine")
    assert told(services) == {"n_gpus_per_node": idle}
    assert made(1).decisions == made(0).decisions == []
    assert "num_gpus" not in rollout_deployment(services)["ray_actor_options"]


def test_the_tools_of_a_file_are_the_tool_servers() -> None:
    file = Path("examples/sglang_multiturn/config/tool_config/gsm8k_tool_config.yaml").absolute()

    settings = ToolsSettings(**args(made(0, f"{R}.multi_turn.tool_config_path={file}"), "tools"))

    assert (settings.tool_config_path, settings.built_in(own_tools=False), settings.drain_s) == (file, [], 60.0)
    [missing] = made(0, f"{R}.multi_turn.tool_config_path=nowhere.yaml").not_found
    assert missing == f"{R}.multi_turn.tool_config_path: expected a file, got nowhere.yaml; correct the path"


def test_on_running_services_each_given_key_of_the_deployment_is_told() -> None:
    decided = decided_already(compose(SCRIPT))

    assert {decision.key: decision.asked for decision in decided} == {
        f"{R}.name": "sglang",
        f"{R}.tensor_model_parallel_size": "2",
        f"{R}.gpu_memory_utilization": "0.6",
    }  # the number of GPUs places the learner's ranks
    assert {decision.reason for decision in decided} == {"decided by the running deployment"}
    assert decided_already(compose([])) == []


def test_the_function_of_a_run_is_the_reward_services() -> None:
    keys = ("path=/rewards.py", "name=score_it", "+reward_kwargs.share=0.5")
    services = made(0, *(f"{key[: key[0] == '+']}custom_reward_function.{key.lstrip('+')}" for key in keys))

    function = {"path": "/rewards.py", "name": "score_it", "reward_kwargs": {"share": 0.5}}
    assert args(services, "reward")["custom_reward_function"] == function


RM = "reward.reward_model"
JUDGED = (f"{RM}.enable=true", f"{RM}.model_path=/models/judge", "custom_reward_function.path=/rewards.py")


def test_a_reward_model_gets_a_service_of_its_own_and_the_reward_service_its_path() -> None:
    keys = ("max_num_seqs=7", "prompt_length=96", "response_length=32", "dtype=float32", "tensor_model_parallel_size=2")
    services = made(0, *JUDGED, *(f"{RM}.rollout.{key}" for key in keys), engine_url="http://policy")

    assert services.missing == []
    assert args(services, "reward")["reward_model"] == {"path": "/models/judge"}
    names = {"model_path": "/models/judge", "model_name": "/models/judge"}
    assert args(services, "reward_model") == {
        **{"engine": "torch", "max_num_seqs": 7, "max_model_len": 128, "dtype": "float32"},
        **names,
    }
    serve_config.check(CPU_CONFIG, services.serve_config)
    application = services.serve_config["applications"][-1]
    assert (application["name"], application["route_prefix"]) == ("reward_model", "/reward_model")
    assert application["import_path"] == "trackway.deploy.graph:rollout"
    [deployment] = application["deployments"]
    assert (deployment["num_replicas"], deployment["max_ongoing_requests"]) == (1, 14)
    assert "reward_model" not in args(made(0, "custom_reward_function.path=/rewards.py"), "reward")


def test_verls_old_spelling_of_a_reward_model_is_read_and_its_server_has_gpus_beside_the_runs() -> None:
    old = (
        *("reward_model.enable=true", "reward_model.model.path=/models/judge", "reward_model.rollout.name=vllm"),
        *("reward_model.rollout.gpu_memory_utilization=0.75", "reward_model.rollout.enforce_eager=true"),
        *("reward_model.rollout.tensor_model_parallel_size=2", "reward_model.rollout.enable_prefix_caching=false"),
        *("reward_model.rollout.max_model_len=64", "custom_reward_function.path=/rewards.py"),
    )
    services = made(4, *old, f"{R}.name=vllm", "trainer.n_gpus_per_node=2", engine_python="/opt/python")

    assert services.missing == []
    assert args(services, "reward_model") == {
        **{"engine_python": "/opt/python", "engine": "vllm", "tensor_parallel_size": 2, "max_model_len": 64},
        **{"gpu_memory_utilization": 0.75, "enforce_eager": True, "prefix_caching": False, "max_num_seqs": 256},
        **{"model_path": "/models/judge", "model_name": "/models/judge"},
    }
    [deployment] = services.serve_config["applications"][-1]["deployments"]
    own = {"env_vars": {"CUDA_VISIBLE_DEVICES": "2,3"}}
    assert deployment["ray_actor_options"] == {"num_cpus": 0.5, "num_gpus": 0, "runtime_env": own}

    on_cpu = args(made(0, *old, engine_python="/opt/python"), "reward_model")
    assert (on_cpu["engine"], on_cpu["device"], "tensor_parallel_size" in on_cpu) == ("vllm", "cpu", False)
    for gpus, key, taken in ((3, ["trainer.n_gpus_per_node=2"], 2), (4, [], 4)):
        assert made(gpus, *old, f"{R}.name=vllm", *key, engine_python="/opt/python").missing == [
            f"reward.reward_model: expected 2 GPUs beside the run's {taken}, got {gpus} on this machine; lower "
            "trainer.n_gpus_per_node, or serve the model elsewhere and give its address as "
            "custom_reward_function.reward_kwargs.reward_router_address"
        ]


@pytest.mark.parametrize(
    ("gpus", "visible", "keys", "own", "shared"),
    [
        (2, None, ["trainer.n_gpus_per_node=1", f"{R}.name=vllm"], {"1"}, "0"),
        (8, None, ["trainer.n_gpus_per_node=6", f"{R}.name=vllm", f"{RM}.rollout.name=vllm"], {"7"}, "0,1,2,3,4,5,6"),
        (2, "GPU-5,GPU-3", [], {"GPU-3"}, "GPU-5"),
    ],
)
def test_the_gpu_of_a_reward_model_is_hidden_from_ray_and_the_learner(
    monkeypatch: pytest.MonkeyPatch, gpus: int, visible: str | None, keys: list[str], own: set[str], shared: str
) -> None:
    monkeypatch.setattr(services_for_run, "gpus_here", lambda: gpus)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    services = made(gpus, *JUDGED, *keys, engine_python="/opt/python")

    assert services.missing == []
    assert serve_config.own_gpus(services.serve_config) == own
    assert shared_gpus(services.serve_config) == {"CUDA_VISIBLE_DEVICES": shared}
    assert shared_gpus(made(gpus, *keys, engine_python="/opt/python").serve_config) == {}


def test_a_reward_model_does_not_share_the_learners_only_gpu() -> None:
    alone = made(1, *JUDGED)
    assert [said.partition(" on this machine")[0] for said in alone.missing] == [
        "reward.reward_model: expected 1 GPUs beside the run's 1, got 1"
    ]
    assert made(1, *JUDGED, "trackway.device=cpu").missing == []


def test_a_reward_models_engine_is_its_own_and_not_that_of_the_policy() -> None:
    own = (*JUDGED, f"{RM}.rollout.name=sglang", f"{R}.name=vllm", "trainer.n_gpus_per_node=1")
    services, on_cpu = (made(gpus, *own, engine_python="/opt/python") for gpus in (2, 0))

    assert (services.missing, args(services)["engine"]) == ([], "vllm")
    assert args(services, "reward_model") == {
        **{"engine": "sglang", "engine_python": "/opt/python", "tensor_parallel_size": 1, "max_num_seqs": 256},
        **{"model_path": "/models/judge", "model_name": "/models/judge"},
    }
    assert args(on_cpu, "reward_model")["engine"] == "torch"
    said = [decision[1:] for decision in on_cpu.decisions if decision.key == f"{RM}.rollout.name"]
    assert said == [("sglang", "torch, the embedded engine", "this machine has no GPU")]
    assert f"{RM}.rollout.name" not in {decision.key for decision in services.decisions}


def test_lengths_beyond_a_reward_models_positions_are_missing_before_its_embedded_engine_starts(tmp_path: Path) -> None:
    file = {"architectures": ["LlamaForSequenceClassification"], "vocab_size": 9, "max_position_embeddings": 4200}
    (tmp_path / "config.json").write_text(json.dumps(file))
    alone, key = (f"{RM}.enable=true", f"{RM}.model_path={tmp_path}"), f"{RM}.rollout.max_model_len"
    long = (*alone, "data.max_prompt_length=4000", "data.max_response_length=500")
    expected = "max_model_len: expected at most 4200, the most that the model's max_position_embeddings allow, got {}; "

    for words, length in ((long, 4500), ((*alone, f"{key}=4201"), 4201)):
        [missing] = made(0, *words).missing
        assert missing.startswith(f"{expected.format(length)}lower it (of a run: {key})")
    for words in ((*long, f"{key}=4200"), (*long, f"{RM}.rollout.name=vllm"), alone):
        assert made(0, *words, engine_python="/opt/bin/python").missing == []


def test_what_a_reward_model_is_stands_in_its_config_and_is_said(tmp_path: Path) -> None:
    alone = (f"{RM}.enable=true", f"{RM}.model_path={tmp_path}")
    long = ("data.max_prompt_length=4000", "data.max_response_length=500")

    def said(services: RunServices) -> list[str]:
        return [decision.got for decision in services.decisions if decision.key == f"{RM}.model_path"]

    unknown = made(0, *alone)
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForSequenceClassification"]}')
    scores, asked = made(0, *alone, *long), made(0, *JUDGED, *alone)
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    generates, generative = made(0, *JUDGED, *alone, *long), made(0, *alone)

    assert [said(services) for services in (unknown, scores, asked, generates)] == [
        ["a model not on this machine yet, whose logit of the conversation is the score"],
        ["a classifier, whose logit of the conversation is the score"],
        ["a classifier, which custom_reward_function asks"],
        ["a generative model, which custom_reward_function asks"],
    ]
    assert [services.missing for services in (unknown, scores, asked, generates)] == [[], [], [], []]
    assert generative.missing == [
        "reward.reward_model.model_path: expected a classifier (an architecture *ForSequenceClassification) without "
        f"custom_reward_function.path, got a generative model at {tmp_path}; name a function that asks it"
    ]
    assert args(scores, "reward")["reward_model"] == {"path": str(tmp_path)}
    assert args(scores, "reward_model") == {
        **{"engine": "torch", "model_path": str(tmp_path), "model_name": str(tmp_path), "max_model_len": 4500},
    }
    assert "max_model_len" not in args(generates, "reward_model")


def test_an_engine_on_the_gpu_sleeps_for_the_whole_of_supervised_training():
    words = ["trackway.rollouts_from=rows", "data.train_files=rows.jsonl"]

    on_gpu, on_cpu = made(1, *words), made(0, *words)

    assert (args(on_gpu)["enable_sleep"], on_gpu.config.actor_rollout_ref.rollout.free_cache_engine) == (True, True)
    assert "enable_sleep" not in args(on_cpu) and "enable_sleep" not in args(made(1))
