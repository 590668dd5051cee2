"""What the fixtures of this folder are, and the length of their windows."""

from collections.abc import Callable
from typing import Any

from scripts.engine_checks.model_server import ModelServer

Serve = Callable[..., ModelServer]
Compare = Callable[..., dict[str, Any]]
WINDOW = 40
