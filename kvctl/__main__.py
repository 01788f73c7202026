"""The `kvctl` command and `python -m kvctl`: sees to Ctrl-C before anything is imported that takes time."""

import os
import signal


def main() -> None:
    """Run the command line. Until its modules are there, Ctrl-C ends the program without a word."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # else it is ignored (a job in the background), or somebody else's
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(130))
    from kvctl.cli.app import main as run

    signal.signal(signal.SIGINT, before)
    run()


if __name__ == "__main__":
    main()
