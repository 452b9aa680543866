"""The store's server: RPC methods around the state machine and its log."""
