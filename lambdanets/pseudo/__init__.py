"""Pseudo-labels: a teacher labels images, they are chosen and balanced, and a student learns from them as well."""
