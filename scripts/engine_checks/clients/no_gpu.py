"""Stands in for CUDA's streams and events: Kimi K3's classes make them with the model, and loading never uses them."""

from typing import Any

import torch


class Idle:
    """A stream or an event of a GPU that is not there."""

    def __init__(self, *args: Any, **options: Any) -> None: ...


def replace_streams() -> None:
    """Let models be made that have streams and events."""
    torch.cuda.Stream = torch.cuda.Event = Idle
