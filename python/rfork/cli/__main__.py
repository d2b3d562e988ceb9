"""`python -m rfork.cli`, for where the console script is not on the path."""

from rfork.cli import main

main()
