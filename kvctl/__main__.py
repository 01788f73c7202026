"""`python -m kvctl`."""

from kvctl.cli.app import main

if __name__ == "__main__":
    main()
