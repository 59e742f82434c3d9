"""Experiments on top of the library. The library never imports them; each can be deleted."""
