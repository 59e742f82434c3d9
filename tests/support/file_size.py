"""A disk that is full, by the limit of this process on the size of a file."""

import resource
from contextlib import contextmanager


def limit(size):
    """No file of this process grows beyond so many bytes: the last write is cut short, and the next one fails."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


@contextmanager
def unlimited_afterwards():
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
