"""`k2convert` and `python -m k2convert`. Interrupts are caught first: importing the command line takes a while."""

import sys

from k2convert.cli.interrupts import (
    Interrupted,
    catch_interrupts,
    end_interrupted,
    release_interrupts,
    report_unraisable,
)


def main() -> None:
    """Run the command line; see `k2convert.cli.app.main`."""
    try:
        catch_interrupts()
        sys.unraisablehook = report_unraisable
        from k2convert.cli.app import main

        main()
    except Interrupted:
        end_interrupted()
    finally:
        release_interrupts()


if __name__ == "__main__":
    main()
