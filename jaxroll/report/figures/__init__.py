"""Figures of a run, computed from its metrics rows and its log."""
