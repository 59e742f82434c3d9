"""A byte-level causal language model of lambda layers, and a baseline with softmax attention."""
