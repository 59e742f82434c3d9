"""Iterated self-training: rounds of pseudo-labelling in which each student becomes the next teacher."""
