"""The one training loop. A `Task` says what a batch, a loss and a score are; `fit` does the rest, and loses nothing."""
