"""The HTML page of a run: sections, plots, style."""
