#!/usr/bin/env bash
# `build.sh [tools|services-cpu|services-gpu-vllm]...`: builds images with podman, docker or buildah. By default the two
# that need no GPU. From the environment:
#   ENGINE         podman, docker or buildah, instead of the first that works
#   BASE           base image, instead of python:3.11-slim-bookworm; where that is not reached, one made by base.sh
#   PIP_INDEX_URL  package index; PIP_FIND_LINKS: folder of wheels, among them torch's CPU build
#   SSL_CERT_FILE  certificates to trust while building, for a company's proxy; HTTPS_PROXY and the like go along by themselves
#   BUILD_OPTIONS  further options of the engine's `build`
set -euo pipefail
cd "$(dirname "$0")/../.."
here=deploy/docker

engine() {
  local one
  for one in "$here/podman.sh" docker buildah; do
    if "$one" info >/dev/null 2>&1; then echo "$one" && return; fi
  done
  echo "expected podman, docker or buildah that can build here, got none; install one, or start docker's daemon" >&2
  exit 2
}

base() {
  local official=python:3.11-slim-bookworm own=localhost/trackway-base:bookworm
  if "$ENGINE" pull "$official" >/dev/null 2>&1; then echo "$official" && return; fi
  echo "no registry has $official: a base from Debian's packages" >&2
  "$ENGINE" inspect "$own" >/dev/null 2>&1 || bash "$here/base.sh" "$ENGINE" "$own" >&2
  echo "$own"
}

build() {
  local name=$1 target=trackway extras=cpu,postgres torch=cpu options=()
  case $name in
    tools) target=tools extras=tools,reward,serve ;;
    services-cpu) ;;
    services-gpu-vllm) target=gpu-vllm torch="" ;;
    *) echo "expected tools, services-cpu or services-gpu-vllm, got $name" >&2 && exit 2 ;;
  esac
  [ -z "$torch" ] || [ ! -d "${PIP_FIND_LINKS:-}" ] || options+=(--build-context "wheels=$PIP_FIND_LINKS")
  [ ! -e "$certificates" ] || options+=(--secret "id=ca,src=$certificates")
  [ -z "${PIP_INDEX_URL:-}" ] || options+=(--build-arg "INDEX=$PIP_INDEX_URL")
  [ "$ENGINE" = docker ] || options+=(--network host)
  # shellcheck disable=SC2086
  "$ENGINE" build --file "$here/Dockerfile" --target "$target" --tag "trackway-$name:$version" \
    --build-arg "BASE=$BASE" --build-arg "EXTRAS=$extras" --build-arg "TORCH_BACKEND=$torch" \
    --build-arg "NAME=trackway-$name" --build-arg "VERSION=$version" \
    --build-arg "REVISION=$revision" "${options[@]}" ${BUILD_OPTIONS:-} .
}

ENGINE=${ENGINE:-$(engine)}
[ "$ENGINE" != podman ] || ENGINE=$here/podman.sh
BASE=${BASE:-$(base)}
version=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
revision=$(git rev-parse HEAD 2>/dev/null || echo unknown)
certificates=${SSL_CERT_FILE:-/etc/ssl/certs/ca-certificates.crt}
[ $# -gt 0 ] || set -- tools services-cpu
for image in "$@"; do build "$image"; done
