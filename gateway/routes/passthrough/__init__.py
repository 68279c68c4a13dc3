"""Pass-through of Triton's own HTTP API (`/v2/**`), in plain ASGI for speed.

Tables define the paths that are forwarded or rejected and the headers that are removed. Successful
responses are streamed byte for byte; only Triton's errors are rewritten.
"""
