"""Trajectory store: a pure state machine, its commit log on disk, the RPC server and the client.

`core` decides requests and applies events (no clock, no files, no asyncio), `log` makes the events durable, `server`
answers calls, `client` is used by the other roles. docs/store_contract.md has the states of a group and the promises.
"""
