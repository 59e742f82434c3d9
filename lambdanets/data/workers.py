"""Signal handling of worker processes.

A cluster or a terminal signals every process of a run. The main process handles these signals and needs its workers
until it has finished, so workers ignore signals from other senders.
"""

import os
import signal
import threading


def obey_parent_only(worker: int = 0) -> None:
    """Ignore SIGINT, and SIGTERM unless the parent process sent it to stop the worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=wait_for_parent, name="signals", daemon=True).start()


def loss_of_worker(error: BaseException) -> str | None:
    """Return a message for the user if an error is torch's report of a killed worker process; otherwise None."""
    text = " ".join(str(error).split())
    if not isinstance(error, RuntimeError) or not text.startswith("DataLoader worker (pid"):
        return None
    return (
        f"a worker process that reads images was killed, usually because memory or shared memory ran out: use fewer "
        f"workers or free some memory ({text[:200]})"
    )


def wait_for_parent() -> None:
    while True:
        try:
            sender = signal.sigwaitinfo({signal.SIGTERM}).si_pid
        except InterruptedError:
            continue
        if sender == os.getppid():
            os._exit(0)
