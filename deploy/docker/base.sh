#!/usr/bin/env bash
# Where no image registry is reached: `base.sh ENGINE NAME` makes the base image from Debian's packages. Like
# python:3.11-slim-bookworm it is Debian 12 with Python 3.11, without documentation, manuals and translations.
# Needs root and Debian's mmdebstrap; the mirror is that of this machine's apt, or MIRROR.
set -euo pipefail
engine=$1 name=$2
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
options=()
for path in doc man info locale lintian; do options+=("--dpkgopt=path-exclude=/usr/share/$path/*"); done
options+=("--dpkgopt=path-include=/usr/share/doc/*/copyright")
# usr-is-merged instead of usrmerge, which would bring all of Perl.
mmdebstrap --quiet --variant=minbase --include=ca-certificates,python3,usr-is-merged \
  --hook-dir=/usr/share/mmdebstrap/hooks/merged-usr --aptopt='APT::Install-Recommends "false"' "${options[@]}" \
  bookworm "$folder/base.tar" ${MIRROR:+"$MIRROR"}
if [ "$(basename "$engine")" = buildah ]; then
  container=$(buildah from scratch)
  buildah add --quiet "$container" "$folder/base.tar" / >/dev/null
  buildah commit --quiet --rm "$container" "$name"
else
  "$engine" import "$folder/base.tar" "$name"
fi
