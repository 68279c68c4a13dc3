"""The REST front door of NVIDIA Triton Inference Server."""

__version__ = "0.2.0"
