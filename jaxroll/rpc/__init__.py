"""How processes call one another: raw MessagePack bytes over grpc.aio, a token per run and role, limits, deadlines."""

import os

# gRPC's own line for every handshake or frame that is wrong would let strangers fill the disk with logs. Read by grpc
# when it is loaded.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
