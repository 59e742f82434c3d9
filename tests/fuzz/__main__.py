"""Run cases again: `python -m tests.fuzz FORMAT [NUMBER ...]`."""

import sys
import tempfile
from pathlib import Path

from tests.fuzz.formats import COUNTS, summary
from tests.fuzz.pool import run_all


def main(arguments: list[str]) -> int:
    names = [arguments[0]] if arguments else list(COUNTS)
    numbers = [int(word) for word in arguments[1:]]
    jobs = [(name, number) for name in names for number in numbers or range(COUNTS[name])]
    with tempfile.TemporaryDirectory() as place:
        results = run_all(jobs, Path(place))
    if numbers:
        print("\n".join(f"{one.format} {one.number} {one.verdict} {one.seconds:.2f} s {one.text}" for one in results))
    print(summary(results))
    return int(any(one.verdict == "failed" for one in results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
