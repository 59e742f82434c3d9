"""Text, byte by byte: a causal language model of lambda layers and its twin of softmax attention."""
