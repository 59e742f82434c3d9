"""Cases that crash, block or exhaust the memory of their worker, for testing the harness."""

import os
import signal
import socket

from tests.fuzz.case import FuzzCase

KINDS = ("whole", "killed", "whole", "hangs", "memory", "network", "whole")


def run(case: FuzzCase) -> bool:
    kind = KINDS[case.number]
    if kind == "killed":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif kind == "hangs":  # also with the alarm off, as in a call that does not return to Python
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        while True:
            signal.pause()
    elif kind == "memory":
        case.attempt(lambda: bytearray(64 * 2**30), names=("",))
    elif kind == "network":
        case.attempt(lambda: socket.create_connection(("127.0.0.1", 9)), names=("",))
    return True
