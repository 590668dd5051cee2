"""`k2convert` and `python -m k2convert`. Interrupts are caught first: importing the command line takes a while."""

from k2convert.cli.interrupts import catch_interrupts, leave


def main() -> None:
    """Run the command line; see `k2convert.cli.app.main`. A failed command does not wait for its threads."""
    catch_interrupts()
    from k2convert.cli import app

    try:
        app.main()
    except SystemExit as ended:
        if isinstance(ended.code, int) and ended.code:
            leave(ended.code)
        raise


if __name__ == "__main__":
    main()
