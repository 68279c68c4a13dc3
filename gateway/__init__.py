"""The REST front door of NVIDIA Triton Inference Server."""
