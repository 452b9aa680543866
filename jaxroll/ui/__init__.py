"""Dashboard of the runs in a folder: a page in the browser that follows them and controls live ones."""
