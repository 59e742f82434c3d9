"""Write the rows of the paper's tables and the labels of its tables and figures as JSON, for the tests.

python benchmarks/paper_tables.py lambdanetworks.tex tests/experiments/reproduce/paper_tables.json
"""

import re
import sys
from pathlib import Path
from typing import Any

from lambdanets.files import write_json

QUOTED = (r"0.9\% over the corresponding architecture with standard 3x3",)  # from the text


def tables(source: str) -> dict[str, Any]:
    """Return the rows of each table by its label, as LaTeX without comments and extra whitespace."""
    source = re.sub(r"(?<!\\)%.*", "", source)
    found: dict[str, list[str]] = {}
    for match in re.finditer(r"\\begin\{table\*?\}(.*?)\\end\{table\*?\}", source, re.DOTALL):
        rows = re.findall(r"\\begin\{tabular\}.*?\n(.*?)\\end\{tabular\}", match[1], re.DOTALL)
        lines = [" ".join(line.split()) for row in rows for line in row.split("\\\\")]
        for label in re.findall(r"\\label\{([^}]+)\}", match[1]):
            found[label] = [
                re.sub(r"\\(top|mid|bottom)rule|\\hline", "", line).strip() for line in lines if "&" in line
            ]
    return {
        "labels": re.findall(r"\\label\{((?:tab|fig):[^}]+)\}", source),
        "tables": found,
        "quotes": [quote for quote in QUOTED if quote in source],
    }


if __name__ == "__main__":
    write_json(Path(sys.argv[2]), tables(Path(sys.argv[1]).read_text()))
