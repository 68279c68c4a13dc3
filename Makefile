# `make help` lists the commands. A target with a `##` comment is listed there.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PEERS := .venv-peers
CLIENTS := .venv-clients
OLDEST_CLIENT := .venv-oldest-client
SITE := .venv-site
RELEASE := .venv-release
RESNET50 := .venv-resnet50
# Number of parallel test processes: tests wait more than they compute. JOBS=0 uses one process, for a debugger.
JOBS ?= 4
PYTEST = $(BIN)/python -m pytest -n $(JOBS) --dist loadgroup
# With uv if it is in PATH or comes from pip at once, otherwise with pip: TITLE ENVIRONMENT LOCK...
INSTALL := $(PYTHON) requirements/install.py --fetch-uv
LOCK = uv pip compile --universal --generate-hashes --no-emit-index-url --no-header --no-annotate --python-version 3.10 --quiet

# The embedded Triton runs its models with 3.10, 3.11 or 3.12, which may be beside the gateway's Python.
define CHECK_PYTHON
$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 15))' || { \
	echo "triton-gateway needs CPython 3.10 to 3.14; $(PYTHON) is $$($(PYTHON) -V 2>&1)"; \
	for found in python3.12 python3.11 python3.10 python3.14 python3.13; do \
		if command -v $$found > /dev/null; then echo "use: make $(MAKECMDGOALS) PYTHON=$$found"; exit 1; fi; \
	done; \
	echo "install one (Debian, Ubuntu: apt-get install python3.12 python3.12-venv; elsewhere: uv python install 3.12)"; \
	echo "then use: make $(MAKECMDGOALS) PYTHON=python3.12"; \
	exit 1; \
} >&2
endef
MODELS_PYTHON = $(BIN)/python -c 'from gateway.embedded import installation as i; print(i.find_models_python().executable)'

SENTENCES := triton_repo/text_core/1/model.onnx
OWN_ENV := triton_repo_examples/own_env/python_env

# The processes that the tests start would otherwise compile the gateway again and again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help run test test-long test-all test-unit durations mutants house rerun-failed soak chaos containers test-cluster page check fmt
.PHONY: diagrams client clients test-clients test-triton bench bench-count bench-peers resnet50 manifests interface site dist workflows audit crds lock clean models examples

help: ## List the commands
	@awk -F ':.*## ' '/^[a-z][a-z0-9-]*:.*## / {printf "make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

run: $(VENV)/.gateway models ## Start an embedded Triton with two demonstration models, and the gateway; ARGS="--port 9000"
	@exec $(BIN)/triton-gateway up $(ARGS)

test: $(VENV)/.dev models examples .pytest_cache/compiled ## Run the tests of every capability and kind of fault (5 minutes)
	@$(PYTEST) -m "not long and not soak and not containers" $(ARGS)

test-long: $(VENV)/.dev models examples .pytest_cache/compiled ## Run the other tests: full tables, simulations, fuzzing, all documents
	@$(PYTEST) -m "long and not soak and not containers" --hypothesis-profile=long $(ARGS)

test-all: test test-long ## Run both

# Each process collects these tests in 5 s, so that few processes are faster.
test-unit: JOBS := 3
test-unit: $(VENV)/.dev models ## Run the tests that start no process (40 s)
	@$(PYTEST) -m "not long and not soak" $(wildcard tests/*/unit tests/*/*/unit) $(ARGS)

# Record the time of each group of tests; the longest start first.
durations: $(VENV)/.dev models examples
	@$(PYTEST) -m "not soak and not containers" --record-durations $(ARGS)

# Compile the tests as pytest does, once: each process of `make test` would. `make test` reports what is wrong.
.pytest_cache/compiled: $(VENV)/.dev
	-@$(BIN)/python -m pytest -n 0 --collect-only -qq > /dev/null 2>&1
	@mkdir -p $(@D) && touch $@

# Run by hand before tests are deleted; ARGS="NAME …" seeds single faults, ARGS=--quick runs the likely tests only.
mutants: $(VENV)/.dev models examples ## Seed faults and report which tests notice them (2.5 hours)
	@$(BIN)/python -m tests.mutants $(ARGS)

house: ## Print the lines of each folder of the gateway beside its budget
	@$(PYTHON) -m tests.house

# Rerun the tests that failed in the last run; one that passes now is reported as flaky.
rerun-failed: $(VENV)/.dev ## Run the tests that failed in the last run again, and report flaky ones
	@$(BIN)/python -m tests.rerun_failed $(ARGS)

# Run sequentially, because most of these tests measure: times, rates and memory are compared with their limits.
soak: $(VENV)/.dev models ## Run for an hour: measure faults, mutate bytes, send hostile requests
	@TRITON_GATEWAY_COMPARE_NUMBERS=1 $(BIN)/python -m pytest -n 0 -s -m "soak or fault" --hypothesis-profile=random $(ARGS)
	@$(BIN)/python -m tests.soak

# The same seed gives the same choices; ARGS="--without upload,flush" leaves some out. Stops at the first violation.
chaos: $(VENV)/.dev ## Kill, pause and change a fleet at random, and check every promise; SEED=1 STEPS=50
	@$(BIN)/python -m tests.chaos $(if $(SEED),--seed $(SEED)) $(if $(STEPS),--steps $(STEPS)) $(ARGS)

# In namespaces of its own, which it removes; ARGS="--without CoreDNS,node" leaves out what concerns others, too.
# tests/cluster/kind.sh creates a cluster for it; docs/contribute/verification.md lists what it does.
test-cluster: $(VENV)/.dev ## Install on the current cluster, which CLUSTER_CONTEXT names, and disturb it under load
	@$(BIN)/python -m tests.cluster --context "$(CLUSTER_CONTEXT)" --images "$(IMAGES)" $(ARGS)

# Build and run the images without a registry or a cluster; reports missing tools.
containers: $(VENV)/.dev ## Build and run the images without a registry
	@$(BIN)/python -m pytest -n 0 -s -v tests/project/test_containers.py $(ARGS)

# Test the web page in a real Chromium; also part of `make test`. PAGE_PICTURES=FOLDER keeps a picture of each view.
page: $(VENV)/.dev models ## Test the page in Chromium
	@$(BIN)/python -m pytest -n 0 tests/capabilities/page/test_page.py $(ARGS)

check: $(VENV)/.dev ## Check format, lint and types, and print remarks
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	@$(BIN)/python -m tests.remarks

fmt: $(VENV)/.dev ## Format the code and apply safe fixes
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.dev ## Measure beside nginx, a plain FastAPI application and other proxies, and compare with the limits
	@$(BIN)/python -m benchmarks $(ARGS)

# Count the instructions of one request, which the load of the machine does not change; needs valgrind.
bench-count: $(VENV)/.dev ## Count the instructions of a request; ARGS=--compare reports changes
	@$(BIN)/python -m benchmarks.count $(ARGS)

bench-peers: $(PEERS)/.ready ## Install Envoy, vLLM's router, KServe and perf_analyzer for `make bench`
	@echo "make bench now includes what $(PEERS) contains"

# Create a model repository in resnet50_repo/; ARGS="--weights none" avoids the download.
resnet50: $(RESNET50)/.ready ## Export ResNet-50 as a model repository in resnet50_repo/
	@$(RESNET50)/bin/python -m models.export_resnet50 --output resnet50_repo $(ARGS)

models: $(VENV)/.gateway ## Build the demonstration models
	@$(BIN)/python -m models.sentences

examples: $(OWN_ENV)/.ready ## Build the environment of the example model that brings its own

# Hash-locked installs; repeated when a lock file changes.
$(VENV)/.gateway: requirements/build.txt requirements/gateway.txt pyproject.toml
	@$(CHECK_PYTHON)
	@$(INSTALL) "the gateway's environment" $(VENV) requirements/build.txt requirements/gateway.txt --editable .
	@touch $@

$(VENV)/.dev: $(VENV)/.gateway requirements/dev.txt
	@$(INSTALL) "the packages of the tests" $(VENV) requirements/dev.txt
	@touch $@

$(SITE)/.ready: requirements/site.txt
	@$(INSTALL) "the environment of the documentation site" $(SITE) requirements/site.txt
	@touch $@

$(RELEASE)/.ready: requirements/release.txt requirements/build.txt
	@$(INSTALL) "the environment of releases" $(RELEASE) requirements/release.txt requirements/build.txt
	@touch $@

# Clients which need newer or older packages than the tests.
clients: $(CLIENTS)/.ready $(OLDEST_CLIENT)/.ready ## Install KServe, PyTriton, LangChain and other clients, which the tests then run against the gateway

$(CLIENTS)/.ready: requirements/clients.txt
$(OLDEST_CLIENT)/.ready: requirements/oldest-client.txt
$(CLIENTS)/.ready $(OLDEST_CLIENT)/.ready:
	@$(INSTALL) "an environment of clients" $(@D) $<
	@touch $@

# Another release of Triton: docs/operate/lifecycle.md says when to run it.
test-triton: $(VENV)/.dev ## Check how a running Triton behaves; TRITON=http://triton:8000
	@TRITON="$(TRITON)" $(BIN)/python -m pytest -n 0 -v tests/core/integration/test_conformance.py $(ARGS)

test-clients: $(VENV)/.dev clients ## Compare what clients get from a real Triton and from the gateway
	@$(BIN)/python -m pytest -n 0 -v tests/clients $(ARGS)

# For benchmarks only; pinned separately. perf_analyzer needs a newer C library than the rest of the project.
$(PEERS)/.ready: requirements/peers.txt requirements/perf-analyzer.txt
	@$(INSTALL) "the peers' environment" $(PEERS) requirements/peers.txt
	@$(INSTALL) "perf_analyzer" $(PEERS) requirements/perf-analyzer.txt 2>/dev/null || \
		echo "perf_analyzer is skipped: it needs glibc 2.38 or newer on x86-64"
	@touch $@

# The environment of the example model own_env, with the Python of the other models.
$(OWN_ENV)/.ready: triton_repo_examples/own_env/requirements.txt $(VENV)/.gateway
	@$$($(MODELS_PYTHON)) -m venv --clear --without-pip $(OWN_ENV)
	@PATH="$(BIN):$$PATH" $(BIN)/python requirements/install.py "the environment of the example model own_env" $(OWN_ENV) $<
	@touch $@

# PyTorch, for the export only; on Linux its wheels include CUDA.
$(RESNET50)/.ready: requirements/resnet50.txt
	@$(INSTALL) "PyTorch's environment, about 3 GB on Linux," $(RESNET50) requirements/resnet50.txt
	@touch $@

# Generate the rules and the dashboard of k8s/components/monitoring from deploy/monitoring, and the chart's copies,
# schema and README; tests compare them. RUNBOOKS=https://… is the address where docs/ is published, for the links in alerts.
manifests: $(VENV)/.dev ## Generate the files of k8s/ and the Helm chart that have another source
	@$(BIN)/python deploy/monitoring/prometheusrule.py $(RUNBOOKS) > k8s/components/monitoring/rules.yaml
	@cp deploy/monitoring/dashboard.json k8s/components/monitoring/dashboard.json
	@$(BIN)/python -m deploy.helm.chart

# Packages, checks of an index, and the SBOM. The same commit always gives the same files.
dist: $(RELEASE)/.ready ## Build and check the packages of a release in dist/
	@rm -rf dist && $(RELEASE)/bin/python -m hatchling build
	@$(RELEASE)/bin/python -m twine check --strict dist/*
	@$(RELEASE)/bin/python -m deploy.sbom requirements/image.txt 3.11 > dist/sbom.cdx.json

workflows: $(RELEASE)/.ready ## Check the workflows
	@$(RELEASE)/bin/zizmor --offline --quiet .github

# The lookup needs an index with a database of vulnerabilities, which not every mirror has.
audit: workflows ## Look up known vulnerabilities of the locked packages, and check the workflows
	@$(RELEASE)/bin/python -m pip_audit --strict --disable-pip --require-hashes -r requirements/image.txt

# Warnings, such as a link or an anchor that does not exist, fail the build.
site: $(SITE)/.ready ## Build the documentation site in build/site
	@rm -rf build/docs && $(SITE)/bin/python -m deploy.site.prepare build/docs
	@NO_MKDOCS_2_WARNING=1 $(SITE)/bin/python -m mkdocs build --strict
	@echo "the site is in build/site"

# Draw the diagrams of docs/ as SVG in docs/diagrams, which the guide shows; a test compares their sources. It needs Chromium and npm.
MERMAID := build/node_modules/mermaid/dist/mermaid.min.js
diagrams: $(VENV)/.dev $(MERMAID) ## Draw the diagrams of the documents
	@$(BIN)/python -m deploy.site.diagrams $(MERMAID)

$(MERMAID):
	@npm install --silent --no-save --prefix build mermaid@11.17.2

# Record docs/openapi.json and docs/interface.txt, which tests compare; ARGS=--breaking also records removals.
interface: $(VENV)/.dev ## Record the public interface
	@$(BIN)/python -m tests.interface $(ARGS)

# Generate gateway/client/client.py from async_client.py; a test compares them.
client: $(VENV)/.dev ## Generate the synchronous client from the one for asyncio
	@$(BIN)/python -m tests.interface.sync_client

# From npm, locked by hash; without them, their tests are skipped.
crds: ## Install the schemas of custom resources, and programs that read the API description
	@npm ci --prefix tests/crds --ignore-scripts --no-audit --no-fund
	@npm ci --prefix tests/generators --ignore-scripts --no-audit --no-fund

lock: ## Resolve the dependencies and write requirements/*.txt
	$(LOCK) pyproject.toml -o requirements/gateway.txt
	$(LOCK) pyproject.toml --extra redis --extra otel --extra s3 --extra oidc -c requirements/gateway.txt -o requirements/image.txt
	$(LOCK) pyproject.toml --group dev -c requirements/gateway.txt -o requirements/dev.txt
	$(LOCK) --group build -o requirements/build.txt
	$(LOCK) --group uv -o requirements/uv.txt
	$(LOCK) --group site -o requirements/site.txt
	$(LOCK) --group release -c requirements/build.txt -o requirements/release.txt
	$(LOCK) --group models -o requirements/models.txt
	$(LOCK) --group resnet50 -o requirements/resnet50.txt
	$(LOCK) --group peers -o requirements/peers.txt
	$(LOCK) --group perf-analyzer -o requirements/perf-analyzer.txt
	$(LOCK) --group clients -o requirements/clients.txt
	$(LOCK) --group oldest-client -o requirements/oldest-client.txt
	$(LOCK) requirements/sentences.in -o requirements/sentences.txt
	$(LOCK) triton_repo_examples/own_env/requirements.in -o triton_repo_examples/own_env/requirements.txt

clean: ## Remove the environments and caches
	rm -rf build $(VENV) $(SITE) $(RELEASE) $(PEERS) $(CLIENTS) $(OLDEST_CLIENT) $(RESNET50) $(OWN_ENV) .mypy_cache .pytest_cache .ruff_cache
