"""What a finished or live run looks like, read from its folder: summary, plots, page. No JAX, no running process."""
