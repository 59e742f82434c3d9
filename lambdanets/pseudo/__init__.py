"""Pseudo-labels: label images with a teacher, select and balance the labels, train a student on them."""
