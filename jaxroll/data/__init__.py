"""Data: sources of items, the stream of training prompts, and the held-out set. Never initializes a JAX backend.

Read `sources` first (what a config can name, and how to add a source), then `tasks` (from items to tasks, ranges,
held-out questions, the resumable stream). `preparation` checks a task before a run and makes the warm start's examples.
"""
