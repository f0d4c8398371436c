"""`python -m omnibal`."""

from omnibal.cli import main

main()
