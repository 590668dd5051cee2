"""Gives serve commands to the parser of SGLang's server."""

from __future__ import annotations

import argparse
import sys

from scripts.engine_checks.clients import sglang_on_cpu
from scripts.engine_checks.clients.parsing import check_commands


def main() -> int:
    """Parse the request's commands."""
    sglang_on_cpu.enable()
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return check_commands(parser, skip=2)  # -m sglang.launch_server


if __name__ == "__main__":
    sys.exit(main())
