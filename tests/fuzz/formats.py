"""The formats that are fuzzed, and the table of results."""

from collections import Counter
from collections.abc import Sequence

from tests.fuzz.pool import Result

COUNTS = {
    "images": 900,
    "csv_lists": 450,
    "idx": 350,
    "shards": 700,
    "coco": 500,
    "results": 250,
    "run_config": 450,
    "hub_config": 450,
    "weights": 350,
    "checkpoints": 200,
    "logs": 250,
    "labels": 400,
    "stdin": 150,
}
"""Number of cases of each format; `tests/fuzz/NAME.py` generates and checks them."""

SMOKE = dict.fromkeys(COUNTS, 10) | {"checkpoints": 2, "logs": 4}
"""Number of cases of each format in the fast tests, which train nothing."""


def summary(results: Sequence[Result], failures: int = 200) -> str:
    """Return a table of the cases, results and slowest case of each format, then the failures."""
    lines = [f"{'format':14s} {'cases':>6s} {'refused':>8s} {'accepted':>9s} {'failed':>7s}  slowest"]
    groups: dict[str, list[Result]] = {}
    for one in results:
        groups.setdefault(one.format, []).append(one)
    for name, group in {**groups, "all": list(results)}.items():
        counts = Counter(one.verdict for one in group)
        slowest = max(group, key=lambda one: one.seconds)
        which = f"{slowest.format} {slowest.number}" if name == "all" else f"case {slowest.number}"
        lines.append(
            f"{name:14s} {len(group):6,d} {counts['refused']:8,d} {counts['accepted']:9,d} {counts['failed']:7,d}  "
            f"{slowest.seconds:.2f} s ({which})"
        )
    failed = [one for one in results if one.verdict == "failed"]
    lines += [f"FAILED {one.format} {one.number}: {one.text}" for one in failed[:failures]]
    lines += [f"... and {len(failed) - failures} more"] if len(failed) > failures else []
    return "\n".join(lines)
