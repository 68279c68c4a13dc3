"""The commands of `triton-gateway` for who uses a gateway. They import nothing of the server."""
