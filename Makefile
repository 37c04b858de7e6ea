# The commands that the README, CONTRIBUTING and CI share. `make help` lists them.
.DEFAULT_GOAL := help
SHELL := /bin/bash

SEED ?= 0
PYTHON ?= $(shell command -v python3.11 || command -v python3)
# Which PyTorch to install: cpu, or what `uv pip install --torch-backend` knows (auto, cu130, ...).
TORCH_BACKEND ?= cpu

VENV := .venv
BIN := $(VENV)/bin
# Weave's trace server in an environment of its own: 0.52.35 is one of the last releases that hold the server on sqlite,
# and 0.53.12 the last that holds the mapping from OpenTelemetry to calls.
WEAVE := .venv-weave
WEAVE_SERVER := 0.52.35
WEAVE_MAPPING := 0.53.12
# vLLM's CPU build in an environment of its own: its pins (torch, fastapi) conflict with ours.
VLLM := .venv-vllm
# SGLang on the CPU in an environment of its own, with stand-ins for what needs CUDA (tests/sglang/stand_ins).
SGLANG := .venv-sglang
# The package as an installation has it, in one folder: import-linter reads one folder of a package.
ONE := .cache/one-package
CODE := services clients deploy tests examples benchmarks docs typings
PYTEST := $(BIN)/python -m pytest
# The files that have the mark alone, since others beside them import every service.
MANIFEST_TESTS = $(sort $(shell grep -rlE --include='test_*.py' 'mark\.manifests\b' tests))
# The files that use MLflow's server or a weight store in S3.
STORE_TESTS = $(sort $(shell grep -rlE --include='test_*.py' 'mlflow_server: str|mark\.stores\b' tests))
# A machine that keeps wheels of its own (PIP_FIND_LINKS) has its CPU torch there; others take it from PyTorch's index.
TORCH_FROM := $(if $(PIP_FIND_LINKS),$(foreach place,$(PIP_FIND_LINKS),--find-links $(place)),--torch-backend $(TORCH_BACKEND))
# Byte-compiling at install time halves the start of Ray, MLflow and every service.
INSTALL := $(BIN)/uv pip install --python $(BIN)/python --compile-bytecode --quiet $(TORCH_FROM) --constraint constraints.txt
export OMP_NUM_THREADS := 1

.PHONY: help demo ui bench test durations test-fast gpu-check gpu-check-bundle test-vllm test-vllm-core test-sglang test-sglang-core test-extended test-pods test-agents test-model test-chaos test-learning test-endurance test-install test-stores test-kubernetes test-mutants test-all check check-manifests docs docs-serve format lock audit sbom image picture clean

help: ## Show this list.
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

demo: $(VENV)/.cpu ## Train the tiny model with all five services and MLflow; SEED=n, ARGS='--keep'.
	$(BIN)/trackway demo --seed $(SEED) $(ARGS)

ui: $(VENV)/.cpu ## Look at the demo's traces in MLflow.
	$(BIN)/trackway ui

test: $(VENV)/.dev $(WEAVE)/.ready ## Run the test suite, but for vLLM's and SGLang's parts; ARGS='-k name' for a part.
	@$(BIN)/python tests/programs.py
	$(BIN)/python tests/run_all.py $(ARGS)

durations: ## Run the test suite and record what each file takes in tests/durations.
	@$(MAKE) --no-print-directory test ARGS='--record-durations $(ARGS)'

test-fast: $(VENV)/.dev ## Run the tests that start no process, server or sandbox (under 2 minutes on 2 cores).
	$(PYTEST) -n 2 --dist worksteal -p no:schemathesis --ignore tests/services/tools/test_api_fuzz.py -m 'not slow and not e2e and not extended and not vllm and not sglang and not pods and not manifests and not chaos and not install and not agents and not model and not stores and not kubernetes' $(ARGS)

gpu-check: ## Check and measure on this machine's NVIDIA GPUs: 20 minutes, 40 with several (installs 30 GB, once); writes build/gpu-check.json.
	@$(MAKE) --no-print-directory VENV=.venv-cuda TORCH_BACKEND=cu130 .venv-cuda/.dev .venv-vllm-cuda/.ready .venv-sglang-cuda/.ready
	.venv-cuda/bin/python -m tests.gpu_check $(ARGS)

gpu-check-bundle: $(VENV)/.dev ## Download what gpu-check needs, for a machine without a network; ARGS='--only numbers' for a part of 57 MB.
	$(BIN)/python -m tests.gpu_check.bundle build/gpu-check $(ARGS)

test-vllm: $(VENV)/.dev $(VLLM)/.ready ## Run the rollout engine against a real vLLM on the CPU (3.4 GB, once; minutes).
	$(PYTEST) -m vllm tests/vllm $(ARGS)

test-vllm-core: $(VENV)/.dev $(VLLM)/.ready ## Run the part of test-vllm that CI runs: what one server can show.
	$(PYTEST) -m 'vllm and not extended' tests/vllm $(ARGS)

test-sglang: $(VENV)/.dev $(SGLANG)/.ready ## Run the rollout engine against a real SGLang on the CPU (2.8 GB, once; minutes).
	$(PYTEST) -m sglang tests/sglang $(ARGS)

test-sglang-core: $(VENV)/.dev $(SGLANG)/.ready ## Run the part of test-sglang that CI runs: logprobs, versions, proof.
	$(PYTEST) -m sglang tests/sglang/core $(ARGS)

test-extended: $(VENV)/.dev $(WEAVE)/.ready ## Run the slow tests that rarely fail, which make test leaves out (minutes; on demand).
	$(PYTEST) -m 'extended and not vllm and not sglang' $(ARGS)

test-pods: $(VENV)/.dev ## Start the quick start's pods and agents' containers with podman (root; builds the images first).
	@[ "$$(id -u)" = 0 ] && command -v podman >/dev/null || { echo "expected root and podman, got $$(id -un) and podman at '$$(command -v podman)'; run it as root where podman is installed" >&2; exit 2; }
	@$(MAKE) --no-print-directory image
	$(PYTEST) -m pods tests/k8s/test_pods.py tests/services/agent/sessions/test_podman.py $(ARGS)

test-agents: $(VENV)/.dev ## Run each agent of examples/agents with its framework, and the recipes of Tinker's cookbook, as they are (needs Node.js and Python 3.12; installs 2 GB, once; minutes).
	PATH="$(abspath $(BIN)):$$PATH" $(PYTEST) -m agents tests/services/agent tests/services/trainer/tinker tests/e2e/test_framework_spans.py $(ARGS)

test-model: $(VENV)/.dev ## Check SmolLM2-135M in engines and learners (downloads 93 MB, once; minutes); SEEDS='0 1 2' also trains it.
	SEEDS="$(SEEDS)" $(PYTEST) -s -m model tests/model $(ARGS)

test-chaos: $(VENV)/.dev ## Kill, stop and terminate processes and nodes during runs, and send 20,000 random requests (an hour; on demand); SEED=n, CASES=n.
	SEED="$(SEED)" CASES="$(CASES)" $(PYTEST) -m chaos tests/attacks/test_fuzz.py tests/e2e tests/cluster $(ARGS)

test-learning: $(VENV)/.dev ## Train the demo's task with every estimator and loss, three seeds each: which learn it? (hours; on demand).
	$(BIN)/python benchmarks/learning.py estimators $(ARGS)
	$(BIN)/python benchmarks/learning.py losses $(ARGS)

test-endurance: $(VENV)/.dev ## Train 3,000 of the demo's steps and plot their seconds, CPU and each process's memory (an hour; on demand); ARGS='--steps 300'.
	$(BIN)/python benchmarks/endurance.py $(ARGS)

test-install: $(VENV)/.dev ## Install the wheel with each extra alone, on each Python found, and start what it is for (minutes; on demand).
	$(PYTEST) -m 'install or not install' tests/install $(ARGS)

test-stores: $(VENV)/.dev ## Run MLflow's tests on PostgreSQL 17 and an S3 server, and a run with its weights there (installs 90 MB; minutes).
	$(INSTALL) --editable '.[stores]'
	TRACKWAY_TEST_STORES=1 $(PYTEST) -m 'not e2e and not weave and not extended' $(STORE_TESTS) $(ARGS)

test-kubernetes: $(VENV)/.dev ## Run the guide's commands on the cluster of kubectl's context, without Trackway and with the images (for 20 minutes; deletes the namespace).
	@$(BIN)/kubectl cluster-info >/dev/null || { echo "expected a cluster in kubectl's context, got none; make one with tests/k8s/live/kind.yaml or k3d.yaml" >&2; exit 2; }
	PATH="$(abspath $(BIN)):$$PATH" $(PYTEST) -m kubernetes tests/k8s/live $(ARGS)

test-mutants: $(VENV)/.dev ## Change the pure modules one place at a time: do their tests fail? ARGS='--minutes 5 loss'.
	$(PYTEST) -n 2 -m mutants tests/test_mutants.py --quiet
	$(BIN)/python tests/mutants.py $(ARGS)

test-all: test test-vllm-core test-sglang-core ## Run all three, as CI does.

check: $(VENV)/.dev ## Check format, lint, types, the floors of the house, and what check-manifests does.
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/ruff check $(CODE)
	@rm -rf $(ONE) && mkdir -p $(ONE) && cp -rL services/trackway clients/trackway deploy/trackway $(ONE)
	PYTHONPATH=$(ONE) $(BIN)/lint-imports --no-cache
# Two threads take half the time. Node's own limit of 4 GB is less than pyright caches.
	NODE_OPTIONS=--max-old-space-size=6144 $(BIN)/pyright --threads 2
	@$(MAKE) --no-print-directory check-manifests

check-manifests: $(VENV)/.dev ## Check the manifests, that breaking them is noticed, and the Dockerfile; without a cluster.
	$(BIN)/python -m tests.k8s.check
	$(PYTEST) -p no:schemathesis -p no:hypothesispytest -m manifests $(MANIFEST_TESTS) --quiet
	$(BIN)/hadolint deploy/docker/Dockerfile

docs: $(VENV)/.dev ## Build the documentation into outputs/site; its Reference is made from the code.
	cd docs && ../$(BIN)/python -m generators
	$(BIN)/zensical build --strict --clean

docs-serve: docs ## Show the documentation at http://localhost:8000, built again when a page changes.
	$(BIN)/zensical serve

format: $(VENV)/.dev ## Format the code and fix what the linter can fix.
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

lock: $(VENV)/.uv ## Resolve constraints.txt again.
	$(BIN)/uv pip compile pyproject.toml --extra dev --extra pictures --extra bench --extra stores --python-version 3.11 $(TORCH_FROM) --no-annotate --no-header --quiet --upgrade -o constraints.txt
	$(BIN)/uv pip compile tests/weave/requirements.in --python-version 3.11 --no-annotate --no-header --quiet --upgrade -o tests/weave/constraints.txt
	$(BIN)/uv pip compile tests/vllm/requirements.in --override tests/vllm/overrides.txt --python-version 3.11 $(subst $(TORCH_BACKEND),cpu,$(TORCH_FROM)) --no-annotate --no-header --quiet --upgrade -o tests/vllm/constraints.txt
	$(BIN)/uv pip compile tests/sglang/requirements.in --override tests/sglang/overrides.txt --python-version 3.11 $(subst $(TORCH_BACKEND),cpu,$(TORCH_FROM)) --no-annotate --no-header --quiet --upgrade -o tests/sglang/constraints.txt
	$(BIN)/uv pip compile deploy/docker/inside/vllm.in --python-version 3.11 --python-platform x86_64-manylinux_2_36 --no-annotate --no-header --quiet --upgrade -o deploy/docker/inside/vllm.txt
	sed -i -E 's/^(torch==[0-9.]+)\+cpu$$/\1/' constraints.txt

audit: $(VENV)/.uv ## Look up known vulnerabilities of the locked packages (asks PyPI).
	set -e; for lock in constraints.txt tests/vllm/constraints.txt tests/sglang/constraints.txt deploy/docker/inside/vllm.txt; do \
	  $(BIN)/uv tool run pip-audit@2.10.1 --no-deps --disable-pip --requirement $$lock; done

sbom: $(VENV)/.uv ## Write the locked packages as a CycloneDX bill of materials, build/sbom.json.
	mkdir -p build
	$(BIN)/uv tool run --from cyclonedx-bom@7.5.0 cyclonedx-py requirements constraints.txt --output-format JSON -o build/sbom.json

image: ## Build the container images; IMAGE='tools services-cpu services-gpu-vllm', the first two by default.
	deploy/docker/build.sh $(IMAGE)

picture: $(VENV)/.cpu ## Make the README's pictures from the last demo (needs Chromium).
	$(INSTALL) --editable '.[pictures]'
	$(BIN)/python docs/pictures.py

bench: $(VENV)/.dev $(WEAVE)/.ready ## Measure what tracing costs, beside its peers (ten minutes; nothing else should run).
	$(INSTALL) --editable '.[bench]'
	$(BIN)/python benchmarks/tracing.py caller
	$(BIN)/python benchmarks/tracing.py store --postgres
	$(BIN)/python benchmarks/tracing.py run

clean: ## Remove the environments and every output.
	rm -rf $(VENV) $(WEAVE) $(VLLM) $(SGLANG) .venv-cuda .venv-vllm-cuda .venv-sglang-cuda .venv-trl-cuda .venv-trl .venv-agentlightning .venv-rllm-gateway .venv-openai-agents outputs

$(VENV)/.uv:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || { echo "expected Python 3.11 to 3.13, got $$($(PYTHON) --version); set PYTHON=/path/to/python3.11" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	@touch $@

$(VENV)/.cpu: $(VENV)/.uv pyproject.toml constraints.txt
	@echo "installing the CPU set (first time: a minute or two)"
	$(INSTALL) --editable '.[cpu]'
	@touch $@

$(VENV)/.dev: $(VENV)/.uv pyproject.toml constraints.txt tests/console/axe.txt tests/services/trainer/run_state/harbor.txt
	@echo "installing the development set (first time: a minute or two)"
	$(INSTALL) --editable '.[dev]'
	$(BIN)/uv pip install --python $(BIN)/python --quiet --no-deps --require-hashes --requirement tests/console/axe.txt
	$(BIN)/uv pip install --python $(BIN)/python --quiet --no-deps --require-hashes --python-version 3.12 --target $(VENV)/harbor --requirement tests/services/trainer/run_state/harbor.txt
	@touch $@ $(VENV)/.cpu

$(WEAVE)/.ready: tests/weave/constraints.txt Makefile | $(VENV)/.uv
	@echo "installing Weave's trace server for its contract test"
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python $(WEAVE)
	$(BIN)/uv pip install --quiet --python $(WEAVE)/bin/python --compile-bytecode --requirement tests/weave/constraints.txt
	$(BIN)/uv pip install --quiet --python $(WEAVE)/bin/python --no-deps weave==$(WEAVE_SERVER)
	$(BIN)/uv pip install --quiet --target $(WEAVE)/newer --no-deps weave==$(WEAVE_MAPPING)
	rm -r $(WEAVE)/lib/python3*/site-packages/weave/trace_server/opentelemetry
	mv $(WEAVE)/newer/weave/trace_server/opentelemetry $(WEAVE)/lib/python3*/site-packages/weave/trace_server/
	rm -r $(WEAVE)/newer
	@touch $@

$(VLLM)/.ready: tests/vllm/constraints.txt tests/vllm/overrides.txt | $(VENV)/.uv
	@[ "$$(uname -sm)" = "Linux x86_64" ] || { echo "expected Linux x86_64, which vLLM's pins in tests/vllm/constraints.txt are for, got $$(uname -sm); \`make test\` is everything else" >&2; exit 2; }
	@echo "installing vLLM's CPU build for its tests (3.4 GB; first time: a minute or two)"
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python $(VLLM)
	$(BIN)/uv pip install --quiet --python $(VLLM)/bin/python --compile-bytecode $(subst $(TORCH_BACKEND),cpu,$(TORCH_FROM)) --override tests/vllm/overrides.txt --requirement tests/vllm/constraints.txt
	@touch $@

# For `make gpu-check`: the engines with their own kernels, as in the image.
.venv-vllm-cuda/.ready: deploy/docker/inside/vllm.txt | $(VENV)/.uv
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python $(@D)
	$(BIN)/uv pip install --quiet --python $(@D)/bin/python --compile-bytecode --no-deps --requirement $<
	@touch $@

.venv-sglang-cuda/.ready: tests/sglang/requirements.in | $(VENV)/.uv
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python $(@D)
	$(BIN)/uv pip install --quiet --python $(@D)/bin/python --compile-bytecode --requirement $<
	@touch $@

$(SGLANG)/.ready: tests/sglang/constraints.txt tests/sglang/overrides.txt $(wildcard tests/sglang/stand_ins/*.py tests/sglang/stand_ins/*/*.py) | $(VENV)/.uv
	@[ "$$(uname -sm)" = "Linux x86_64" ] || { echo "expected Linux x86_64, which SGLang's pins in tests/sglang/constraints.txt are for, got $$(uname -sm); \`make test\` is everything else" >&2; exit 2; }
	@echo "installing SGLang for the CPU for its tests (2.8 GB; first time: a minute or two)"
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python $(SGLANG)
	$(BIN)/uv pip install --quiet --python $(SGLANG)/bin/python $(subst $(TORCH_BACKEND),cpu,$(TORCH_FROM)) --override tests/sglang/overrides.txt --requirement tests/sglang/constraints.txt
	cp -r tests/sglang/stand_ins/. $(SGLANG)/lib/python3*/site-packages/
	PYTHONDONTWRITEBYTECODE= SGLANG_USE_CPU_ENGINE=1 $(SGLANG)/bin/python -W ignore -c 'import sglang.srt.entrypoints.http_server, sglang.srt.managers.scheduler'
	@touch $@
