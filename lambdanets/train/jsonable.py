"""The former place of `lambdanets.typed`'s JSON functions."""

from lambdanets.typed import as_before, from_json, to_json

__all__ = ["as_before", "from_json", "to_json"]
