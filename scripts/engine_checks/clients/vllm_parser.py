"""Gives serve commands to the parser of `vllm serve`."""

from __future__ import annotations

import os
import sys

from scripts.engine_checks.clients.parsing import check_commands
from scripts.engine_checks.clients.vllm_on_cpu import ENVIRONMENT


def main() -> int:
    """Parse the request's commands."""
    os.environ.update(ENVIRONMENT)
    from vllm.entrypoints.common.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return check_commands(make_arg_parser(FlexibleArgumentParser()), skip=1)  # serve


if __name__ == "__main__":
    sys.exit(main())
