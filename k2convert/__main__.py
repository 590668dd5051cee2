"""`python -m k2convert`."""

from k2convert.cli import main

main()
