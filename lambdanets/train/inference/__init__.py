"""Use trained weights: evaluation and prediction."""
