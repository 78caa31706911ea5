"""`python -m compile_and_serve.serve.cli`: the same as the console script `compile-and-serve`."""

from compile_and_serve.serve.cli.main import main

main()
