"""How many programs XLA has compiled in this process: the witness of "no recompilation after warm-up"."""

from __future__ import annotations

import jax.monitoring

_EVENT = "/jax/core/compile/backend_compile_duration"


class CompileCounter:
    """Counts from its creation or last `reset`; programs loaded from the persistent cache count too."""

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._seen)

    def reset(self) -> None:
        """Start again at 0."""
        self.count = 0

    def close(self) -> None:
        """Stop counting."""
        jax.monitoring.unregister_event_duration_listener(self._seen)

    def _seen(self, event: str, duration_secs: float, **_: str | int) -> None:
        del duration_secs
        if event == _EVENT:
            self.count += 1
