"""The gRPC client of one Triton."""

import os

# Otherwise the library writes lines of its own about bad calls, without a limit. It reads this once.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
