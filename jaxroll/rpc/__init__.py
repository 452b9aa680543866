"""RPC between processes: MessagePack over grpc.aio, with a token per run and role, TLS, limits and deadlines."""

import os

# gRPC logs a line for every malformed handshake or frame, with which an unknown client could fill the disk. gRPC reads
# this variable when it is loaded.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
