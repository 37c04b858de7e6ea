#!/usr/bin/env bash
# podman with what this machine needs: without systemd its cgroup manager, with cgroups of version 1 runc, without CNI's
# plugins netavark, and limits that do not exceed this shell's. CONTAINERS_CONF of your own goes before.
set -euo pipefail
if [ -z "${CONTAINERS_CONF:-}" ]; then
  export CONTAINERS_CONF=${XDG_CACHE_HOME:-$HOME/.cache}/trackway/containers.conf
  mkdir -p "$(dirname "$CONTAINERS_CONF")"
  {
    echo "[containers]"
    echo "default_ulimits = [\"nofile=$(ulimit -Sn):$(ulimit -Hn)\", \"nproc=4096:4096\"]"
    echo "[network]"
    [ -x /usr/lib/cni/bridge ] || echo 'network_backend = "netavark"'
    echo "[engine]"
    [ -d /run/systemd/system ] || printf 'cgroup_manager = "cgroupfs"\nevents_logger = "file"\n'
    [ -e /sys/fs/cgroup/cgroup.controllers ] || echo 'runtime = "runc"'
  } >"$CONTAINERS_CONF"
fi
exec podman "$@"
