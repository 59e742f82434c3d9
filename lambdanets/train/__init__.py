"""The training loop. A `Task` defines batches, loss and metrics; `fit` trains, evaluates, logs and resumes."""
