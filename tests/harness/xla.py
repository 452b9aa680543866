"""XLA's flags for tests. Compilation is most of the tests' time."""

import importlib.metadata
import os

# XLA's own passes without LLVM's take half of the time, and half of that without MLIR in the emitters of fusions. One
# LLVM module for each program instead of up to 32, which one thread (NPROC=1) compiles in turn, takes a quarter less.
# An unknown flag aborts the process, and jaxlib 0.12.0.1 does not know that of the emitters.
_WITHOUT_MLIR = " --xla_cpu_use_fusion_emitters=false"
_JAXLIB = tuple(int(part) for part in importlib.metadata.version("jaxlib").split(".")[:2])
FAST_COMPILATION = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1" + (
    _WITHOUT_MLIR if _JAXLIB < (0, 12) else ""
)
# Roles that run as processes are compiled as users' are by `make soak` and by tests/process/test_train.py.
ROLE_FLAGS = "" if os.environ.get("HYPOTHESIS_PROFILE") == "soak" else FAST_COMPILATION
