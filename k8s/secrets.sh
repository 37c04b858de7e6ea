#!/usr/bin/env bash
# Prints the Secrets that the manifests name, each with a fresh random value. `create`, not `apply`: it refuses a Secret
# that exists, so a second run replaces no password and no token.
#
#     kubectl apply -f k8s/base/namespace.yaml
#     bash k8s/secrets.sh | kubectl create -f -
#
#   trackway-tokens    token          scope admin: what the services send one another, and an operator's TRACKWAY_TOKEN
#                      client-token   scope execute: for agents outside of the cluster and for Prometheus
#                      tokens.json    what the services know of the two: their sha256
#   trackway-ray       auth_token     Ray's own token: dashboard, REST API, nodes
#   trackway-postgres  password       of MLflow's database
#   trackway-redis     password       of Ray's control store (overlay gpu)
#
# W&B's key is yours to give (overlay weave):
#     kubectl --namespace trackway create secret generic trackway-wandb \
#         --from-literal=api_key=... --from-literal=entity=... --from-literal=project=...
set -euo pipefail

random() { openssl rand -hex 32; }
digest() { printf %s "$1" | openssl dgst -sha256 -r | cut -d ' ' -f 1; }

secret() { # name, then key=value; the values hold nothing that YAML would read as more than text
  printf -- '---\napiVersion: v1\nkind: Secret\nmetadata: { name: %s, namespace: trackway }\nstringData:\n' "$1"
  printf "  %s: '%s'\n" "${@:2}"
}

token=$(random) client=$(random) ray=$(random) postgres=$(random) redis=$(random)
for value in "$token" "$client" "$ray" "$postgres" "$redis"; do
  [[ $value =~ ^[0-9a-f]{64}$ ]] || { echo "secrets.sh: expected 64 hexadecimal digits of openssl rand, got ${#value} characters that are not" >&2; exit 1; }
done
known=$(printf '{"services": {"sha256": "%s", "scopes": ["admin"]}, "clients": {"sha256": "%s"}}' \
  "$(digest "$token")" "$(digest "$client")")

secret trackway-tokens token "$token" client-token "$client" tokens.json "$known"
secret trackway-ray auth_token "$ray"
secret trackway-postgres password "$postgres"
secret trackway-redis password "$redis"
