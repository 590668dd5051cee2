"""Convert Kimi K2 INT4 checkpoints to NVFP4 in one streamed, resumable, measured pass."""

__version__ = "0.1.0"
