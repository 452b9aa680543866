#!/usr/bin/env bash
# Starts the roles of one config on TPU VMs, over `gcloud compute tpus tpu-vm ssh`.
#
#   launch/tpu_vm.sh --config=configs/X.py --zone=us-central2-b --run=runs/x \
#       --on store=vm-a --on learner=vm-a --on sampler-0=vm-b --on evaluator=vm-c [--dry-run]
#
# Every VM needs the same checkout (--workdir) with `pip install 'jaxroll[tpu]'`. A role without --on runs on this
# machine. Roles on one VM split its chips into rectangles (--devices-per-host).
# Between hosts: --tls=DIR names the folder with certificates on each host (`jaxroll tls RUN --host=NAME` makes them), or
# --insecure allows plain text on a network that you trust. Every host needs the run's secret in JAXROLL_TOKEN.
# This script has never run on TPU hardware; the tests compare the lines that it runs (`--dry-run`) with golden files.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
launch tpu_vm "$@"
