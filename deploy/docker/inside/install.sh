#!/usr/bin/env bash
# Inside the image:
#   install.sh pins EXTRAS TORCH_BACKEND   writes pins.txt: every package that these extras of Trackway need, from here
#   install.sh needs TORCH_BACKEND         makes .venv with the packages of /pins.txt
#   install.sh vllm                        makes /opt/vllm, whose pins conflict with ours
set -euo pipefail
uv=/opt/uv/bin/uv
python=$(command -v python3)

torch_from() { # a folder with torch's wheel, PyTorch's index, or the package index, which has the build for CUDA
  if compgen -G '/wheels/torch-*.whl' >/dev/null; then
    torch=(--find-links /wheels)
  elif [ -n "$1" ]; then
    torch=(--torch-backend "$1")
  else
    torch=()
  fi
}

case $1 in
  pins)
    [ -n "$2" ] || { echo "expected --build-arg EXTRAS=..., such as tools,reward,serve, got none" >&2; exit 2; }
    torch_from "$3"
    read -ra extras <<<"--extra ${2//,/ --extra }"
    "$uv" pip compile --quiet --python "$python" --no-annotate --no-header --constraint constraints.txt \
      "${torch[@]}" "${extras[@]}" pyproject.toml --output-file pins.txt
    ;;
  needs)
    torch_from "$2"
    "$uv" venv --quiet --python "$python" .venv
    "$uv" pip install --quiet --python .venv/bin/python --no-deps "${torch[@]}" --requirement /pins.txt
    ;;
  vllm)
    "$uv" venv --quiet --python "$python" /opt/vllm
    "$uv" pip install --quiet --python /opt/vllm/bin/python --compile-bytecode --no-deps --requirement /inside/vllm.txt
    ;;
esac
