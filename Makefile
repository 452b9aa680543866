# `make` lists the targets. Everything is installed in .venv, pinned by constraints.txt; nothing is read from the terminal.
PYTHON ?= python3
SEED   ?= 0
ARGS   ?=

SHELL := /bin/bash
VENV  := .venv
PIP   := $(VENV)/bin/python -m pip --disable-pip-version-check --no-input
NEED_DISK_MB := 3072
NEED_DISK_MB_MORE := 1536

# JAX on CPU, one thread a process: the bits do not depend on the cores. One compilation cache for all runs.
export PYTHONUNBUFFERED := 1
TEST_ENV := JAX_PLATFORMS=cpu NPROC=1 JAX_COMPILATION_CACHE_DIR="$(CURDIR)/.cache/jax" \
  JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0 JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES=-1

.DEFAULT_GOAL := help
.PHONY: help demo test soak lint bench docs constraints clean venv-demo venv

help:
	@echo "make demo         install core + environments (about 1.1 GB) and train a small model here; SEED=0"
	@echo "make test         install the rest (about 2.2 GB in all) and run the tests; ARGS='-k store' is passed on"
	@echo "make soak         the long tests"
	@echo "make lint         ruff and pyright"
	@echo "make bench        every script in benchmarks/"
	@echo "make docs         the reference pages, in docs/_build"
	@echo "make venv         only install what the tests need"
	@echo "make constraints  pin the newest versions that fit pyproject.toml again"
	@echo "make clean        remove caches; runs/ and .venv stay"
	@echo "PYTHON=/path/to/python3.12 picks the interpreter (3.11 or newer); now: $(PYTHON)"

demo: venv-demo
	@$(VENV)/bin/jaxroll demo --seed=$(SEED) $(ARGS)

test: venv
	@$(TEST_ENV) $(VENV)/bin/python -m pytest -rfEs --durations=15 $(ARGS) </dev/null

soak: venv
	@$(TEST_ENV) HYPOTHESIS_PROFILE=soak $(VENV)/bin/python -m pytest -rfEs --durations=15 -m soak $(ARGS) </dev/null || [ $$? -eq 5 ]  # 5: there is none

lint: venv
	@echo "ruff check" && $(VENV)/bin/ruff check .
	@echo "ruff format --check" && $(VENV)/bin/ruff format --check .
	@echo "pyright" && $(VENV)/bin/pyright

bench: venv
	@set -e; shopt -s nullglob; scripts=(benchmarks/[!_]*.py); \
	[ $${#scripts[@]} -gt 0 ] || echo "benchmarks/ holds no script"; \
	for script in "$${scripts[@]}"; do echo "== $$script"; $(VENV)/bin/python "$$script" $(ARGS) </dev/null; done

docs: venv
	@rm -rf docs/_build
	@$(TEST_ENV) $(VENV)/bin/pdoc --docformat google -o docs/_build jaxroll
	@echo "docs/_build/index.html"

# uv resolves for every Python and platform at once; it lives in a folder of its own and is used for nothing else.
UV_INPUT := jax[tpu] ; sys_platform == 'linux' and platform_machine == 'x86_64'
constraints: venv-demo
	@set -eo pipefail; [ -x .cache/uv/bin/uv ] || { $(VENV)/bin/python -m venv .cache/uv; .cache/uv/bin/python -m pip install -q uv; }; \
	new=$$(echo "$(UV_INPUT)" | .cache/uv/bin/uv pip compile --quiet --universal --python-version 3.11 --upgrade \
	  --extra envs --extra dev --no-annotate --no-header pyproject.toml -); \
	{ sed -n '/^#/p' constraints.txt; echo "$$new"; } >.cache/constraints.txt; mv .cache/constraints.txt constraints.txt; \
	echo "constraints.txt: $$(grep -vc '^#' constraints.txt) pins; run make test before you keep them"

clean:
	@find . \( -path ./.git -o -path './.venv*' -o -path ./runs \) -prune -o -type d -name __pycache__ -print0 | xargs -0 rm -rf
	@rm -rf .cache .pytest_cache .ruff_cache .hypothesis docs/_build build

venv-demo: ; @$(call install,demo,core + environments,-e '.[envs]')
venv:      ; @$(call install,test,core + environments + tools$(comma) and libtpu on Linux x86-64,$(TEST_REQUIREMENTS))

comma := ,
TEST_REQUIREMENTS := -e '.[envs$(comma)dev]' "libtpu ; sys_platform == 'linux' and platform_machine == 'x86_64'"

# $(1) the stamp, $(2) what it is in words, $(3) pip requirements. A stamp holds the digest of all that the environment
# depends on: the interpreter's version, this folder (console scripts hold it), pyproject.toml, constraints.txt.
define install
set -eo pipefail; \
say() { echo "jaxroll: $$*" >&2; }; \
"$(PYTHON)" -c 'pass' >/dev/null 2>&1 || { say "no Python: '$(PYTHON)' does not run. Install Python 3.11 or newer, or name one: make PYTHON=/path/to/python3.12"; exit 1; }; \
"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
  { say "$$("$(PYTHON)" -V 2>&1) ('$(PYTHON)') is too old: JaxRoll needs 3.11 or newer. Name one: make PYTHON=/path/to/python3.12"; exit 1; }; \
made=$$("$(PYTHON)" -c 'import os, sys; print(*sys.version_info[:2], sys.platform, os.getcwd())'); \
want="$$made $$(cat pyproject.toml constraints.txt | cksum)"; \
ready() { [ -x $(VENV)/bin/python ] && [ "$$(cat $(VENV)/.stamp-$(1) 2>/dev/null)" = "$$want" ]; }; \
if ready; then exit 0; fi; \
if command -v flock >/dev/null; then exec 9>.venv.lock; flock -n 9 || { say "another make is installing here; waiting for it"; flock 9; }; fi; \
if ready; then exit 0; fi; \
base=$$("$(PYTHON)" -c 'import sys; print(getattr(sys, "_base_executable", None) or sys.executable)'); \
"$$base" -c 'import venv, ensurepip' 2>/dev/null || \
  { say "$$base has no venv module with pip. Install it (Debian, Ubuntu: apt install python3-venv), or name another Python: make PYTHON=..."; exit 1; }; \
if [ "$$(cat $(VENV)/.made 2>/dev/null)" != "$$made" ] || ! $(VENV)/bin/python -c 'import pip' 2>/dev/null; then \
  [ ! -e $(VENV) ] || say "$(VENV) was made by another Python, in another folder, or only in part: making it again"; \
  rm -rf $(VENV); \
fi; \
free_mb=$$(df -Pk . | awk 'NR == 2 { print int($$4 / 1024) }'); \
need_mb=$(NEED_DISK_MB); [ ! -e $(VENV) ] || need_mb=$(NEED_DISK_MB_MORE); \
[ "$$free_mb" -ge $$need_mb ] || { say "too little disk: $$free_mb MB are free in $$PWD, $$need_mb MB are needed"; exit 1; }; \
if [ ! -e $(VENV) ]; then say "making $(VENV) with $$("$$base" -V)"; "$$base" -m venv $(VENV); echo "$$made" >$(VENV)/.made; fi; \
say "installing $(2) (some minutes the first time)"; \
$(PIP) install --progress-bar off -c constraints.txt $(3) >$(VENV)/pip.log 2>&1 </dev/null & pid=$$!; \
trap 'kill $$pid 2>/dev/null || true' EXIT INT TERM; \
seconds=0; while kill -0 $$pid 2>/dev/null; do sleep 1; seconds=$$((seconds + 1)); \
  [ $$((seconds % 8)) -ne 0 ] || say "  $$seconds s: $$(grep -v -i warning $(VENV)/pip.log | tail -n 1 | sed 's/^ *//' | cut -c 1-90)"; done; \
wait $$pid || { tail -n 25 $(VENV)/pip.log >&2; say "pip failed; the lines above say why, all of it stands in $(VENV)/pip.log"; exit 1; }; \
trap - EXIT INT TERM; \
[ "$(1)" = demo ] || echo "$$want" >$(VENV)/.stamp-demo; \
echo "$$want" >$(VENV)/.stamp-$(1); \
say "installed in $$seconds s; $(VENV) holds $$(du -sm $(VENV) | cut -f 1) MB"
endef
