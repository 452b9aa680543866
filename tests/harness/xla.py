"""XLA's flags for tests. Compilation is most of the tests' time."""

import os

# XLA's own passes without LLVM's take half of the time, and half of that without MLIR in the emitters of fusions. One
# LLVM module for each program instead of up to 32, which one thread (NPROC=1) compiles in turn, takes a quarter less.
# An unknown flag aborts the process; jaxlib 0.10.2 and 0.12 know these.
FAST_COMPILATION = (
    "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
)
# Roles that run as processes are compiled as users' are by `make soak` and by tests/process/test_train.py.
ROLE_FLAGS = "" if os.environ.get("HYPOTHESIS_PROFILE") == "soak" else FAST_COMPILATION
