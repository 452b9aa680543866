"""Views of a finished or live run, read from its folder: summary, plots, page. No JAX, no running process."""
