"""The gRPC front end: Triton's gRPC API for the fleet, imported only if GATEWAY_GRPC_PORT is set."""
