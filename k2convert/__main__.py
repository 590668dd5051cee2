"""`python -m k2convert`."""

from k2convert.cli.app import main

main()
