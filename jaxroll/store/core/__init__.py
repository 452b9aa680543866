"""The store's state machine: pure decisions and the events that they produce."""
