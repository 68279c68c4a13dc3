"""The command `triton-gateway doctor`."""
