"""Generation requests: an engine on its own thread, served over RPC, and the client that actors use."""
