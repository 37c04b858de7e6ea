#!/usr/bin/env bash
# The tutorial's commands in a container of the image `services-cpu` (`make image`): its own user, no network, nothing
# but the image. `first_hour_in_image.sh FOLDER` keeps the project, its run and its traces in FOLDER.
set -euo pipefail
cd "$(dirname "$0")/../.."
folder=$(mkdir -p "$1" && cd "$1" && pwd)
version=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
chmod 777 "$folder" # the image's user is none of this machine's
sed -n '/^```bash$/,/^```$/{/^```/d;p}' docs/start/your-own-agent.md |
  bash deploy/docker/podman.sh run --rm --interactive --network none --shm-size 1g --read-only --cap-drop ALL \
    --tmpfs /tmp --tmpfs /home/trackway:mode=1777 --volume "$folder:/work" --workdir /work --entrypoint bash \
    "trackway-services-cpu:$version" -exuo pipefail
