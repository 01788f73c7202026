"""Put the demo model into the cache, if it is not there yet, and print its folder."""

import sys

from kvctl.cli.app import print_error
from kvctl.engine.model_source import resolve_model
from kvctl.errors import KvctlError


def main() -> int:
    try:
        print(resolve_model(None).folder)
    except KvctlError as error:
        print_error(error)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
