"""Continuous batching: decode state, jitted prefill and decode programs, the engine, and a naive reference."""
