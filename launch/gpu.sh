#!/usr/bin/env bash
# Starts the roles of one config on GPU machines over ssh, or all of them on this machine.
#
#   launch/gpu.sh --config=configs/X.py --run=runs/x --devices-per-host=8                      # all here
#   launch/gpu.sh --config=configs/X.py --run=runs/x --on store=a --on learner=a --on sampler=b [--dry-run]
#
# Every host needs the same checkout (--workdir) with `pip install 'jaxroll[gpu]'`. Roles on one host split its GPUs
# (--devices-per-host), or share one GPU by memory fractions (--devices-per-host=1 --gpu-memory-mb=81920).
# Between hosts: --tls=DIR names the folder with certificates on each host (`jaxroll tls RUN --host=NAME` makes them), or
# --insecure allows plain text on a network that you trust. Every host needs the run's secret in JAXROLL_TOKEN.
# This script has never run on GPU hardware; the tests compare the lines that it runs (`--dry-run`) with golden files.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
launch gpu "$@"
