"""The paper's numbers beside ours."""

from lambdanets.reproduce.compare import Comparison, compare
from lambdanets.reproduce.rows import DetectionRow, Reading, Row, Table
from lambdanets.reproduce.tables import DETECTION, ROWS, TABLES

__all__ = ["DETECTION", "ROWS", "TABLES", "Comparison", "DetectionRow", "Reading", "Row", "Table", "compare"]
