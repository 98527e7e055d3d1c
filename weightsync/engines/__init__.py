"""Adapters of real inference engines, one folder each, and the table of what their versions can do (`capabilities`)."""
