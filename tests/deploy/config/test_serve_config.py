"""The Serve config: read strictly, completed, scaled."""

import re
from pathlib import Path

import pytest
from ray.serve.config import AutoscalingConfig

from trackway.deploy.bundled import CPU_CONFIG
from trackway.deploy.config import serve_config
from trackway.deploy.config.serve_config import Replicas
from trackway.deploy.local.settings import UpSettings
from trackway.system.process import UserError


@pytest.fixture
def shipped() -> dict:
    return serve_config.load(UpSettings().config)


def application(config: dict, name: str) -> dict:
    return next(app for app in config["applications"] if app["name"] == name)


def test_the_shipped_file_is_a_valid_serve_config(shipped: dict) -> None:
    serve_config.check(CPU_CONFIG, shipped)

    shipped["applications"][0]["deployments"][0]["num_replica"] = 2
    with pytest.raises(UserError, match="unknown key 'applications\\[rollout\\]"):
        serve_config.check(CPU_CONFIG, shipped)


def test_the_shipped_file_has_five_services_each_an_application_of_its_own(shipped: dict) -> None:
    names = [app["name"] for app in shipped["applications"]]
    assert names == ["rollout", "tools", "reward", "agent", "trainer"]
    assert [app["route_prefix"] for app in shipped["applications"]] == [f"/{name}" for name in names]
    assert all(app["deployments"][0]["max_ongoing_requests"] > 5 for app in shipped["applications"])


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("aplications: []", "aplications"),
        (
            "applications: [{name: a, import_path: x.y:z, deployments: [{name: b, num_replica: 2}]}]",
            "applications[a].deployments[b].num_replica",
        ),
        (
            "applications: [{name: a, import_path: x.y:z, deployments: [{name: b, autoscaling_config: {min: 1}}]}]",
            "applications[a].deployments[b].autoscaling_config.min",
        ),
    ],
)
def test_an_unknown_key_is_refused_by_its_path(tmp_path: Path, text: str, key: str) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(text)
    with pytest.raises(UserError, match=re.escape(f"unknown key {key!r}; expected one of ")):
        serve_config.load(file)


def test_a_file_that_is_not_yaml_is_refused_with_its_place(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("applications: [\n")
    with pytest.raises(UserError, match=r"serve.yaml: expected YAML, got: while parsing .* line 2, column 1"):
        serve_config.load(file)


def test_a_wrong_value_is_refused_with_its_place(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("applications: [{name: a, import_path: x.y:z, deployments: [{name: a, num_replicas: -1}]}]\n")
    with pytest.raises(UserError, match="num_replicas"):
        serve_config.load(file)


def test_completing_fills_args_and_the_files_own_words_win(shipped: dict) -> None:
    application(shipped, "tools")["args"] = {"ttl": 5, "tracing": {"token2text": False}}
    common = {"base_url": "u", "ttl": 1, "tracing": {"mlflow_uri": "m"}}
    completed = serve_config.complete(
        shipped, host="127.0.0.1", port=1234, common=common, per_service={"agent": {"model_path": "m"}}
    )
    assert completed["http_options"] == {"host": "127.0.0.1", "port": 1234}
    assert application(completed, "tools")["args"] == {
        "base_url": "u",
        "ttl": 5,
        "tracing": {"mlflow_uri": "m", "token2text": False},
    }
    assert application(completed, "agent")["args"] == {**common, "model_path": "m"}
    assert application(shipped, "agent")["args"] == {}


def test_scaling_changes_one_number_and_nothing_else(shipped: dict) -> None:
    changed = serve_config.with_replicas(shipped, "rollout", Replicas(3, 3))
    assert application(changed, "rollout")["deployments"][0].pop("num_replicas") == 3
    application(shipped, "rollout")["deployments"][0].pop("num_replicas")
    assert changed == shipped


def test_bounds_begin_autoscaling_and_a_number_is_then_two_equal_bounds(shipped: dict) -> None:
    bounded = serve_config.with_replicas(shipped, "rollout", Replicas(1, 4))
    application(bounded, "rollout")["deployments"][0]["autoscaling_config"]["target_ongoing_requests"] = 64
    fixed = serve_config.with_replicas(bounded, "rollout", Replicas(2, 2))
    [begun], [held] = (application(config, "rollout")["deployments"] for config in (bounded, fixed))
    del begun["autoscaling_config"]["policy"], held["autoscaling_config"]["policy"]
    assert begun["autoscaling_config"] == {"target_ongoing_requests": 64, "min_replicas": 1, "max_replicas": 4}
    assert held["autoscaling_config"] == {"target_ongoing_requests": 64, "min_replicas": 2, "max_replicas": 2}
    assert ("num_replicas" in begun, "num_replicas" in held) == (False, False)


@pytest.mark.parametrize("service", ["rollout", "tools", "reward", "agent"])
def test_a_service_scales_by_all_its_calls_unless_it_is_told_otherwise(shipped: dict, service: str) -> None:
    policy = {"policy_function": "trackway.deploy.autoscaling:all_requests"}
    [deployment] = application(serve_config.with_replicas(shipped, service, Replicas(1, 4)), service)["deployments"]
    assert deployment["autoscaling_config"]["policy"] == policy
    AutoscalingConfig.model_validate(deployment["autoscaling_config"])  # Serve finds it
    own = {"policy_function": "ray.serve.autoscaling_policy:default_autoscaling_policy"}
    application(shipped, service)["deployments"][0]["autoscaling_config"] = {"policy": own}
    [kept] = application(serve_config.with_replicas(shipped, service, Replicas(1, 4)), service)["deployments"]
    assert kept["autoscaling_config"]["policy"] == own


@pytest.mark.parametrize(("text", "replicas"), [("2", Replicas(2, 2)), ("1-4", Replicas(1, 4))])
def test_replicas_are_read_as_a_number_or_bounds(text: str, replicas: Replicas) -> None:
    assert (Replicas.parse(text), str(replicas)) == (replicas, text)


@pytest.mark.parametrize("text", ["0", "-1", "4-1", "0-2", "two", "1-", "1..4", ""])
def test_other_words_for_replicas_are_refused(text: str) -> None:
    with pytest.raises(UserError, match=f"at least 1, or bounds like 1-4, got '{re.escape(text)}'"):
        Replicas.parse(text)


def test_scaling_an_unknown_service_names_the_known_ones(shipped: dict) -> None:
    with pytest.raises(UserError, match=r"expected a service of the deployment .rollout, tools"):
        serve_config.with_replicas(shipped, "rolout", Replicas(2, 2))
