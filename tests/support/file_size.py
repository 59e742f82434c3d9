"""Simulation of a full disk by a limit on the file size of this process."""

import resource
from contextlib import contextmanager


def limit(size):
    """Limit files of this process to `size` bytes: the write that exceeds it is truncated, and the next one fails."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


@contextmanager
def unlimited_afterwards():
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
