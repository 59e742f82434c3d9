"""Reading labelled images: sources, the order of samples, decoding, transforms, batches. Nothing that is read runs."""
