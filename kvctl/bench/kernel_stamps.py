"""Has the kernel note when packets come in, from before the first one that matters until the last.

Linux begins to stamp some time after the first socket asks for it (net/core/dev.c puts the switch off to a work queue)
and ends when the last such socket is closed. So one of our own asks, and waits for a stamp, before anything is timed.
Knows no connection: `wire` reads the stamps. Floor 3.
"""

import os
import socket
import sys
import time

SO_TIMESTAMPNS = 35  # asm-generic/socket.h; the socket module of Python 3.11 does not name it
_WAIT_S = 0.2  # it takes a few milliseconds; a kernel without stamps (some sandboxes) is given up then


class KernelStamps:
    """`are_on`: packets are stamped, as long as this is open."""

    def __init__(self) -> None:
        self._fd = -1
        if sys.platform == "linux" and sys.maxsize > 1 << 32:  # `wire` knows the 64-bit form of a stamp
            self._fd = _asking_socket()
        self.are_on = self._fd >= 0

    def close(self) -> None:
        """Ask for stamps no longer."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _asking_socket() -> int:
    """The file descriptor of a socket that sends to itself and has got a stamp; -1: none came."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as own:
        try:
            own.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
            own.settimeout(_WAIT_S)
            own.bind(("127.0.0.1", 0))
            own.connect(own.getsockname())
            end_s = time.monotonic() + _WAIT_S
            while time.monotonic() < end_s:
                own.send(b"?")
                _, ancillary, _, _ = own.recvmsg(1, socket.CMSG_SPACE(16))
                if ancillary:
                    return own.detach()
                time.sleep(0.001)
        except OSError:
            pass  # no stamps here: moments are then those of the reads
    return -1
