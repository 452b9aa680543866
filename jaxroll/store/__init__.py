"""The trajectory server: a pure state machine, its log on disk, the server around it and the clients of it.

`decide` and `apply` are the machine (no clock, no files, no asyncio); `log` makes its events durable; `server` speaks
for it; `client` is what the other roles hold. What a group can become, and what is promised about it, is STORE.md.
"""
