"""The numbers of the paper's tables, and their comparison with ours."""

from lambdanets.experiments.reproduce.marks import Comparison, compare
from lambdanets.experiments.reproduce.rows import DetectionRow, OtherReading, Row
from lambdanets.experiments.reproduce.tables import DETECTION, ROWS, TABLES

__all__ = ["DETECTION", "ROWS", "TABLES", "Comparison", "DetectionRow", "OtherReading", "Row", "compare"]
