#!/usr/bin/env bash
# Starts the roles of one config on GPU machines over ssh, or all on this one.
#
#   launch/gpu.sh --config=configs/X.py --run=runs/x --devices-per-host=8                      # all here
#   launch/gpu.sh --config=configs/X.py --run=runs/x --on store=a --on learner=a --on sampler=b [--dry-run]
#
# Every host holds the same checkout (--workdir) with `pip install 'jaxroll[gpu]'`. Roles that share a host split its
# GPUs (--devices-per-host), or one GPU by memory fractions (--devices-per-host=1 --gpu-memory-mb=81920).
# Between hosts: --tls=DIR names the folder with certificates on each host (`jaxroll tls RUN --host=NAME` makes them), or
# --insecure allows plain text on a net you trust. Every host has the run's secret in JAXROLL_TOKEN.
# This never ran on GPU hardware; the lines it runs are tested (`--dry-run`).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
launch gpu "$@"
