"""The REST front door of NVIDIA Triton Inference Server."""

__version__ = "0.1.0"
