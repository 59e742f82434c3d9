"""Reading labelled images: sources, sample order, decoding, transforms and batches. No data is executed as code."""
