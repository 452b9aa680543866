"""Executors of environments: event loop, threads and processes. Read `choice` first."""
