"""``python -m subquad``: the command line."""

from subquad.cli import main

if __name__ == "__main__":
    main()
