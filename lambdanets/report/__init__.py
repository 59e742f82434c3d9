"""Reports of training runs as HTML pages."""
