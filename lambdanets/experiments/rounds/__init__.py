"""Several rounds of pseudo-labelling, each with the student of the one before as the teacher."""
