"""A CRD's schema as a JSON schema: it refuses what the API server refuses, and nothing else."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from tests.k8s.checks.crd import Strict, strict_schema, without_nulls

pytestmark = pytest.mark.manifests

DERIVED = Path(__file__).parents[2] / "k8s" / "schemas" / "rayservice-ray.io-v1.json.gz"

STRING = {"type": "string"}
PORT = {"type": "object", "properties": {"port": {"type": "integer"}, "protocol": {**STRING, "default": "TCP"}}}
SPEC = {
    "type": "object",
    "required": ["size", "mode"],
    "properties": {
        "size": {"anyOf": [{"type": "integer"}, STRING], "x-kubernetes-int-or-string": True},
        "mode": {**STRING, "default": "on", "enum": ["on", "off"], "description": "prose"},
        "labels": {"type": "object", "additionalProperties": STRING},
        "free": {"type": "object", "x-kubernetes-preserve-unknown-fields": True, "properties": {"known": STRING}},
        "ports": {
            "type": "array",
            "items": PORT,
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": ["port", "protocol"],
        },
    },
}


def crd(**version: Any) -> dict[str, Any]:
    served = {"name": "v1", "schema": {"openAPIV3Schema": {"type": "object", "properties": {"spec": SPEC}}}, **version}
    return {"spec": {"group": "example.org", "names": {"kind": "Thing"}, "versions": [served]}}


def refusals(spec: dict[str, Any], **top: Any) -> list[str]:
    custom_object = {"apiVersion": "example.org/v1", "kind": "Thing", "metadata": {"name": "a"}, "spec": spec, **top}
    return [error.message for error in Strict(strict_schema(crd())).iter_errors(without_nulls(custom_object))]


@pytest.mark.parametrize(
    "spec",
    [
        {"size": 1},  # mode has a default: it is not missing
        {"size": "1"},
        {"size": 1, "labels": {"any": "name"}, "free": {"known": "a", "unknown": 1}},
        {"size": 1, "labels": None},
        {"size": 1, "ports": [{"port": 1}, {"port": 1, "protocol": "UDP"}, {"port": 2}]},
    ],
)
def test_what_the_server_takes_is_taken(spec: dict[str, Any]) -> None:
    assert refusals(spec) == []


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"size": 1, "siez": 2}, "Additional properties are not allowed ('siez' was unexpected)"),
        ({"mode": "on"}, "'size' is a required property"),
        ({"size": None}, "'size' is a required property"),
        ({"size": 1.5}, "1.5 is not valid under any of the given schemas"),
        ({"size": 1, "mode": "auto"}, "'auto' is not one of ['on', 'off']"),
        ({"size": 1, "labels": {"a": 1}}, "1 is not of type 'string'"),
        ({"size": 1, "ports": [{"port": 1}, {"port": 1, "protocol": "TCP"}]}, "two entries have port 1, protocol TCP"),
    ],
)
def test_what_the_server_refuses_is_refused(spec: dict[str, Any], message: str) -> None:
    assert refusals(spec) == [message]


def test_kind_version_and_name_are_the_definitions() -> None:
    assert refusals({"size": 1}, apiVersion="example.org/v2") == ["'example.org/v1' was expected"]
    assert refusals({"size": 1}, kind="Think") == ["'Thing' was expected"]
    assert refusals({"size": 1}, metadata={}) == ["'name' is a required property"]


def test_the_schema_holds_no_prose() -> None:
    assert "description" not in json.dumps(strict_schema(crd()))


def test_a_deprecated_or_missing_version_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"a current version v1, got v1 \(deprecated\)"):
        strict_schema(crd(deprecated=True))
    with pytest.raises(ValueError, match="a current version v2, got v1"):
        strict_schema(crd(), "v2")


def test_the_schema_of_kuberay_knows_its_own_fields_and_no_others() -> None:
    validator = Strict(json.loads(gzip.decompress(DERIVED.read_bytes())))
    pod = {"spec": {"containers": [{"name": "ray", "image": "ray:1"}]}}
    cluster: dict[str, Any] = {"headGroupSpec": {"rayStartParams": {"num-cpus": "0"}, "template": pod}}
    service = {"apiVersion": "ray.io/v1", "kind": "RayService", "metadata": {"name": "a"}}
    good = {**service, "spec": {"rayClusterConfig": cluster}}
    assert [error.message for error in validator.iter_errors(good)] == []
    cluster["headGroupSpec"]["rayStartParams"] = {"num-cpus": 0}
    cluster["workerGroupSpec"] = []
    assert sorted(error.message for error in validator.iter_errors(good)) == [
        "0 is not of type 'string'",
        "Additional properties are not allowed ('workerGroupSpec' was unexpected)",
    ]
