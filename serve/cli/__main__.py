"""`python -m serve.cli`: the same as the console script."""

from serve.cli.main import main

main()
