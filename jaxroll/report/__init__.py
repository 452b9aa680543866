"""Views of a finished or live run, read from its folder. No JAX, no running process.

activity, record, summary            figures of a run, from its metric rows and its log
plots, sections, work, page          its HTML page: plots, sections, and `jaxroll report`, which writes it
inspect, trajectory, archive         the other commands that read a run: inspect; export, replay, checkpoints
formats, trackers                    numbers as text; metrics for Weights & Biases and the like
"""
