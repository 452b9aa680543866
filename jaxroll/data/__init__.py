"""Data: sources of items, the stream of training prompts, and the held-out set. Never initialises a JAX backend.

Read `sources` first (what a config can name, and how to add a source), then `tasks` (from items to tasks, ranges,
held-out questions) and `prompts` (the resumable stream).
"""
