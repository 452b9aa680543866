"""Pure decisions: who is admitted, in what order, into which slot. No JAX, no asyncio, no clock of its own."""
