"""Pure admission decisions: staleness limiter, claim order, filters, health of lease holders. No JAX, no clock."""
