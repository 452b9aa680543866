"""The inference engine: continuous batching of requests over a fixed number of slots and a paged KV cache.

Read `engine` first (the public interface), then `scheduler` (which sequences run, in which slots and pages) and
`programs` (the jitted programs).

    requests         requests, results and commands; their host arrays, one transfer each way
    engine           the engine: one thread steps it, any thread sends commands
    scheduler        slots and pages of sequences, preemption, order of prefills (pure)
    sequence         the scheduler's values, free pages, shared prefixes of prompts; counters and latencies (pure)
    work             executes the schedule on the device; the devices of an engine on several hosts
    device           device state, and one dispatch per operation
    programs         jitted prefill, insert and page moves
    decoding         jitted decode steps: sampling, and speculative decoding
    ledger           the tokens of running requests on the host
"""
