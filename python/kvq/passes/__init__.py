"""Relax passes, one a file; ``pipeline.py`` is the table of contents."""
