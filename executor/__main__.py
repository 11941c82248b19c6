"""`python -m executor`, which torchrun needs, is the command `graphpilot`."""

from executor.cli import main

if __name__ == "__main__":
    main()
