# One entry to everything a developer or CI runs. `make help` lists the targets.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

VENV := .venv
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
PYTEST := $(VENV)/bin/pytest
CODE := operator connector dev proof tests images examples
CLUSTER ?= local
ENGINE ?= reference
REGISTRY ?=
# Extra arguments for pytest: `make test-unit ARGS='-k queue -x'`.
ARGS ?=
# Tests start hundreds of processes; compiling their modules in each would cost as much as running them.
unexport PYTHONDONTWRITEBYTECODE
# By content, so that a new checkout is not checked from nothing.
export MYPY_CACHE_DIR ?= $(or $(PDPOOL_CACHE),$(or $(XDG_CACHE_HOME),$(HOME)/.cache)/pdpool)/mypy

.PHONY: help
help: ## List the targets
	@bold= plain=; if [ -t 1 ]; then bold=$$'\e[1m' plain=$$'\e[0m'; fi; \
	awk -F':.*## ' -v bold="$$bold" -v plain="$$plain" \
	  '/^[a-z-]+:.*## /{printf "  %s%-18s%s %s\n", bold, $$1, plain, $$2}' $(MAKEFILE_LIST)

$(READY): requirements/dev.lock requirements/nodeps.txt pyproject.toml dev/venv.sh
	@dev/venv.sh $(VENV)

.PHONY: venv
venv: $(READY) ## Make the locked Python environment in .venv

.PHONY: demo demo-down
demo: $(READY) ## The whole story on a local Kubernetes, or on yours: CLUSTER=current REGISTRY=registry.example/team; ENGINE=sglang
	@$(PY) -m dev.demo up --engine $(ENGINE) --cluster $(CLUSTER) $(if $(REGISTRY),--registry $(REGISTRY))
demo-down: $(READY) ## Take the local cluster down; CLUSTER=current: remove from yours what the demo made there
	@$(PY) -m dev.demo down --cluster $(CLUSTER)

.PHONY: cluster cluster-down cluster-status
cluster: $(READY) ## Start the local Kubernetes: control plane and two real nodes (NODES=n adds simulated ones)
	@$(PY) -m dev.cluster up $(if $(NODES),--kwok-nodes $(NODES))
cluster-down: $(READY) ## Stop it and undo everything outside the checkout
	@$(PY) -m dev.cluster down
cluster-status: $(READY) ## What runs, where its kubeconfig and logs are
	@$(PY) -m dev.cluster status

.PHONY: run
run: $(READY) ## Run this checkout's operator against the current kubeconfig (ARGS='--watch llm')
	@exec $(PY) -m dev.run_operator $(ARGS)

IMAGES := operator engine router prometheus
.PHONY: images
images: $(READY) ## Build the images and load them into the local cluster
	@$(PY) -m dev.images load $(IMAGES)

.PHONY: check fmt generate
check: $(READY) ## Static checks: ruff, mypy, import-linter, generated files in sync, helm lint
	$(VENV)/bin/ruff check $(CODE)
	$(VENV)/bin/ruff format --check $(CODE)
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports
	$(PY) -m pdpool_operator.api.crd --check crds
	$(PY) -m pdpool_operator.api.condition_docs --check docs/reference/conditions.md
	$(PY) -m pdpool_operator.api.api_docs --check docs/reference/api.md
	$(PY) -m dev.sync_chart --check
	$(PY) -m dev.dashboard --check
	$(PY) -m dev.tools run helm lint --strict charts/pdpool
fmt: $(READY) ## Format and mend what ruff can mend
	$(VENV)/bin/ruff check --fix $(CODE)
	$(VENV)/bin/ruff format $(CODE)
generate: $(READY) ## Write the CRDs from the models, the chart's copies of them, the pages of the API, the dashboard
	$(PY) -m pdpool_operator.api.crd crds
	$(PY) -m pdpool_operator.api.condition_docs docs/reference/conditions.md
	$(PY) -m pdpool_operator.api.api_docs docs/reference/api.md
	$(PY) -m dev.sync_chart
	$(PY) -m dev.dashboard

# What every lock has in common; the images' locks are for one platform and agree with the developers' lock.
COMPILE := $(VENV)/bin/uv pip compile -q --generate-hashes --no-emit-index-url --no-header --no-annotate
FOR_IMAGES := --python-version 3.11 --python-platform x86_64-manylinux_2_28

.PHONY: lock
lock: $(READY) ## Pin the newest versions that pyproject.toml and the images' lists allow
	$(COMPILE) pyproject.toml --all-extras --group dev --universal -p 3.11 --upgrade -o requirements/dev.lock
	$(COMPILE) requirements/fuzz.in --universal -p 3.11 --upgrade -o requirements/fuzz.lock
	for image in operator engine router; do \
	  $(COMPILE) requirements/$$image.in -c requirements/dev.lock $(FOR_IMAGES) -o requirements/$$image.lock; done
	grep nixl requirements/nodeps.txt | $(COMPILE) - --no-deps $(FOR_IMAGES) -o requirements/engine-nodeps.lock

.PHONY: test test-unit test-integration test-cluster
test: $(READY) ## Everything: static checks beside the cluster's start, then all tests, those on the cluster beside the others
	@$(PY) -m dev.tools build
	@$(MAKE) --no-print-directory -j3 check test-collect test-bed
	@$(MAKE) --no-print-directory -j2 test-load test-all
.PHONY: test-collect test-bed test-load test-all
# Compiles every module once, where each of the processes that share the tests would compile them all.
test-collect:
	@found=$$($(PYTEST) --collect-only -qq $(ARGS)) || { echo "$$found"; exit 1; }
test-bed: cluster
	@$(PY) -m dev.images build $(IMAGES)
	@$(PY) -m dev.demo down --keep-cluster
# Two that go together: the tests of the whole stack wait for the images to be in the nodes.
test-load:
	@$(PY) -m dev.images load --built $(IMAGES)
# Nice, for the tests of the whole stack are the longest queue: all pods of a node weigh as much as one process.
test-all:
	@KUBECONFIG=$$($(PY) -m dev.cluster kubeconfig) nice -n 5 $(PYTEST) -n 6 --no-loadscope-reorder $(ARGS)
test-unit: $(READY) ## Pure functions, simulation and the chart: no root, no cluster
	@$(PY) -m dev.tools run helm version --short
	@$(PYTEST) tests/unit tests/simulation tests/chart $(ARGS)
test-integration: $(READY) ## Real processes, zmq, NIXL over loopback: no root, no cluster
	@$(PYTEST) tests/integration $(ARGS)
test-cluster: test-bed ## Tests on the local Kubernetes; what a demo left there is removed first
	@KUBECONFIG=$$($(PY) -m dev.cluster kubeconfig) $(PYTEST) tests/cluster $(ARGS)

.PHONY: simulate fuzz
simulate: $(READY) ## The protocol under every fault: exhaustive search, random runs, and mutants that must be caught
	@$(PY) -m proof.simulate $(ARGS)
fuzz: $(READY) ## Fuzz every decoder and the machines for MINUTES=10, guided by coverage
	@$(VENV)/bin/uv pip install -q -p $(PY) --require-hashes -r requirements/fuzz.lock
	@$(PY) -m proof.fuzz --minutes $(or $(MINUTES),10) $(ARGS)

.PHONY: queue-sim
queue-sim: $(READY) ## Judge HOURS=1000 simulated hours of traffic and faults by the operator's own diagnosis
	@$(PY) -m proof.queue_sim --hours $(or $(HOURS),1000) $(ARGS)

.PHONY: oracle bench-model bench-dataplane bench-connector bench-operator bench-operator-idle
oracle: $(READY) ## 100 prompts unified and over the hand-off: the tokens must be identical
	@$(PY) -m proof.oracle
bench-model: $(READY) ## Speed of the reference model on this machine
	@$(PY) -m pdpool_reference.bench
bench-dataplane: $(READY) ## Data planes beside memcpy and raw NIXL, ratios in one run
	@$(PY) -m proof.bench.dataplane
bench-connector: $(READY) ## The connector beside the bare engines: throughput, latency, aborts, scale (ARGS='--only tiny')
	@$(PY) -m proof.bench.connector --plots docs/benchmarks $(ARGS)
bench-operator-idle: $(READY) ## CPU of an operator at rest, by the number of instances; no cluster, 4 min
	@$(PY) -m proof.bench.operator.idle $(ARGS)
bench-operator: cluster ## The operator with fleets on simulated nodes: latency, CPU, memory, API calls (ARGS='--size 10x10')
	@$(PY) -m proof.bench.operator --plots docs/benchmarks $(ARGS)

.PHONY: hazards soak fences
hazards: $(READY) ## Try the 37 hazards of SGLang's hand-off on ours: real processes, NIXL, Mooncake, zmq
	@$(PY) -m proof.hazards $(ARGS)
fences: $(READY) ## Count bytes that land after a peer's end, its silence, a deregistration: what is proof of quiet
	@$(PY) -m proof.fences $(ARGS)
soak: $(READY) ## 100 000 aborted hand-offs over real data planes, every byte watched (ARGS='--aborts 2000')
	@$(PY) -m proof.soak $(ARGS)

.PHONY: drills
drills: $(READY) ## Faults and changes on the cluster under traffic: what is lost and said, 65 min (ARGS='--times 1 --only router-lost')
	@$(PY) -m dev.cluster up
	@$(PY) -m proof.drills --docs docs/drills.md $(ARGS)

.PHONY: faults
faults: $(READY) ## Faults on the cluster: is the right side named in time and repaired, 4 h (ARGS='--times 1 --only decode-frozen --mode Enforce')
	@$(PY) -m dev.cluster up
	@$(PY) -m proof.faults --docs docs/faults.md $(ARGS)

.PHONY: vllm
vllm: $(READY) ## Real vLLM on CPU with pdpool: tokens, aborts, faults, about 7.5 GB
	@$(PY) -m proof.vllm $(ARGS)

.PHONY: engines
engines: $(READY) ## Real SGLang on CPU with pdpool and stock NIXL, about 6 GB (PART=smoke|tokens|aborts|faults|bench)
	@$(PY) -m proof.engines $(PART:%=--part %) --docs docs/benchmarks $(ARGS)

.PHONY: dist
dist: $(READY) ## Build the wheel and the source distribution into dist/
	$(VENV)/bin/uv build -q --out-dir dist

.PHONY: clean
clean: $(READY) ## Stop the cluster, undo what it changed on the host, remove all that was made in the checkout
	@$(PY) -m dev.cluster down
	@echo "built tools, images and the model stay in $${PDPOOL_CACHE:-$${XDG_CACHE_HOME:-~/.cache}/pdpool}: delete it to start from nothing"
	rm -rf $(VENV) dist .cache/models .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name .git -prune -o -type d -name __pycache__ -prune -exec rm -rf {} +
