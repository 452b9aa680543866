"""From a config to running processes: program, supervisor, launchers, command line. Never imports JAX."""
