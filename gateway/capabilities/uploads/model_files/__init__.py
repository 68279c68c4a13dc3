"""Uploaded model files: their kinds, configs and archives, and the folder that stores them."""
