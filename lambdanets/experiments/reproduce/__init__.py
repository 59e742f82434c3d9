"""The paper's numbers beside ours."""

from lambdanets.experiments.reproduce.compare import Comparison, compare
from lambdanets.experiments.reproduce.rows import DetectionRow, Reading, Row, Table
from lambdanets.experiments.reproduce.tables import DETECTION, ROWS, TABLES

__all__ = ["DETECTION", "ROWS", "TABLES", "Comparison", "DetectionRow", "Reading", "Row", "Table", "compare"]
