"""How processes call one another: raw MessagePack bytes over grpc.aio, a token per run and role, limits, deadlines."""
