"""Server for clients of the Tinker API: training loops that run elsewhere, over a trainer and a sampler here."""
