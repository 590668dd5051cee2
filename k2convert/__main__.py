"""`k2convert` and `python -m k2convert`. Interrupts are caught first: importing the command line takes a while."""

import sys

from k2convert.cli.interrupts import (
    Interrupted,
    catch_interrupts,
    end_interrupted,
    leave,
    release_interrupts,
    report_unraisable,
)


def main() -> None:
    """Run the command line; see `k2convert.cli.app.main`. A failed command does not wait for its threads."""
    try:
        try:
            catch_interrupts()
            sys.unraisablehook = report_unraisable
            from k2convert.cli import app

            app.main()
        except Interrupted:
            end_interrupted()
    except SystemExit as ended:
        if isinstance(ended.code, int) and ended.code:
            leave(ended.code)
        raise
    finally:
        release_interrupts()


if __name__ == "__main__":
    main()
