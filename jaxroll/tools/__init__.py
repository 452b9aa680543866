"""Tools that use JAX outside of a run: warm start, evaluation, generation, import and export of weights.

Each module implements a command: `sft`, `eval`, `generate`, `weights`; `aot` compiles programs for other devices to
report their cost, for `jaxroll plan`.
"""
