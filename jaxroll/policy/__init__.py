"""Pure admission decisions: staleness limiter, filters, adaptive window, health of lease holders. No JAX, no clock."""
