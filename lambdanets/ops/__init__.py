"""The lambda operation as functions on tensors. `reference.py` has the paper's equations, the other files faster
implementations of them.
"""

from lambdanets.ops.operation import explain, lambda_op
from lambdanets.ops.positions import Dense, Positions, Relation, Relative
from lambdanets.ops.reference import lambda_reference

__all__ = ["Dense", "Positions", "Relation", "Relative", "explain", "lambda_op", "lambda_reference"]
