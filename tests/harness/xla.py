"""XLA's flags for tests. Compilation is most of the tests' time."""

import os

# XLA's own passes without LLVM's take half of the time, and half of that without MLIR in the emitters of fusions.
# An unknown flag aborts the process; jaxlib 0.10.2 and 0.12 know these.
FAST_COMPILATION = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
# Roles that run as processes are compiled as users' are by `make soak` and by tests/process/test_train.py.
ROLE_FLAGS = "" if os.environ.get("HYPOTHESIS_PROFILE") == "soak" else FAST_COMPILATION
