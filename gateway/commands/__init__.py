"""The client commands of `triton-gateway`. They do not import the server."""
