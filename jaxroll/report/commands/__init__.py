"""The commands that read a run: report, inspect, replay, export, checkpoints."""
