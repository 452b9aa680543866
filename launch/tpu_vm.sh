#!/usr/bin/env bash
# Starts the roles of one config on TPU VMs, over `gcloud compute tpus tpu-vm ssh`.
#
#   launch/tpu_vm.sh --config=configs/X.py --zone=us-central2-b --run=runs/x \
#       --on store=vm-a --on learner=vm-a --on sampler-0=vm-b --on evaluator=vm-c [--dry-run]
#
# Every VM holds the same checkout (--workdir) with `pip install 'jaxroll[tpu]'`. A role that is named nowhere runs on
# this machine. Roles that share a VM split its chips by rectangles (--devices-per-host).
# Between hosts: --tls=DIR names the folder with certificates on each host (`jaxroll tls RUN --host=NAME` makes them), or
# --insecure allows plain text on a net you trust. Every host has the run's secret in JAXROLL_TOKEN.
# This never ran on TPU hardware; the lines it runs are tested (`--dry-run`).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
launch tpu_vm "$@"
