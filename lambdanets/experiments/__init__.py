"""Experiments that use the library. The library does not import them, so each can be deleted."""
