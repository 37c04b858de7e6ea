"""Converts a CustomResourceDefinition's OpenAPI schema to a JSON schema that is as strict as the API server with
`fieldValidation: Strict`.

    kubectl get crd rayservices.ray.io -o yaml | .venv/bin/python tests/k8s/checks/crd.py [v1] | gzip -n9 > FILE.json.gz

CEL rules (`x-kubernetes-validations`) are not converted.
"""

import json
import sys
from collections.abc import Iterator
from typing import Any

import yaml
from jsonschema import Draft202012Validator, ValidationError
from jsonschema.protocols import Validator
from jsonschema.validators import extend

Schema = dict[str, Any]

_KEPT = ("type", "enum", "pattern", "minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems")
_MAP_KEYS = "x-kubernetes-list-map-keys"
_DEFAULTS = {"protocol": "TCP"}


def strict_schema(crd: Schema, version: str = "v1") -> Schema:
    """The JSON schema of a version. Raises ValueError if the CRD lacks it or marks it as deprecated."""
    found = next((served for served in crd["spec"]["versions"] if served["name"] == version), None)
    if found is None or found.get("deprecated"):
        raise ValueError(f"expected a CRD with a current version {version}, got {_versions(crd)}")
    schema = _strict(found["schema"]["openAPIV3Schema"])
    named = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    schema["properties"] |= {"metadata": named, "status": {}}
    schema["properties"]["apiVersion"] = {"const": f"{crd['spec']['group']}/{version}"}
    schema["properties"]["kind"] = {"const": crd["spec"]["names"]["kind"]}
    schema["required"] = sorted({*schema.get("required", []), "apiVersion", "kind", "metadata"})
    return schema


def without_nulls(node: Any) -> Any:
    """The object without null fields, which the server drops before validation."""
    if isinstance(node, dict):
        return {key: without_nulls(value) for key, value in node.items() if value is not None}
    return [without_nulls(item) for item in node] if isinstance(node, list) else node


def _strict(node: Schema) -> Schema:
    made: Schema = {key: node[key] for key in _KEPT if key in node}
    if node.get("x-kubernetes-int-or-string"):
        made["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    if "properties" in node:
        made["properties"] = {name: _strict(schema) for name, schema in node["properties"].items()}
        # The server applies defaults before it checks required fields.
        required = [name for name in node.get("required", []) if "default" not in node["properties"].get(name, {})]
        made |= {"required": required} if required else {}
        if "additionalProperties" not in node and not node.get("x-kubernetes-preserve-unknown-fields"):
            made["additionalProperties"] = False
    if "additionalProperties" in node:
        values = node["additionalProperties"]
        made["additionalProperties"] = _strict(values) if isinstance(values, dict) else values
    if "items" in node:
        made["items"] = _strict(node["items"])
    if _MAP_KEYS in node:
        made[_MAP_KEYS] = node[_MAP_KEYS]
    if node.get("x-kubernetes-list-type") == "set":
        made["uniqueItems"] = True
    return made


def _versions(crd: Schema) -> str:
    said = [
        served["name"] + (" (deprecated)" if served.get("deprecated") else "") for served in crd["spec"]["versions"]
    ]
    return ", ".join(said)


def _distinct(_: Validator, keys: list[str], entries: object, __: object) -> Iterator[ValidationError]:
    """No two entries have equal merge keys."""
    seen = set()
    for entry in entries if isinstance(entries, list) else []:
        same = tuple((key, str(entry.get(key, _DEFAULTS.get(key)))) for key in keys) if isinstance(entry, dict) else ()
        if same in seen:
            said = ", ".join(f"{key} {value}" for key, value in same)
            yield ValidationError(f"two entries have {said}")
        seen.add(same)


Strict = extend(Draft202012Validator, {_MAP_KEYS: _distinct})
"""Validates by such a schema, and by those of Kubernetes' own kinds."""


if __name__ == "__main__":
    json.dump(strict_schema(yaml.safe_load(sys.stdin), *sys.argv[1:]), sys.stdout, separators=(",", ":"))
