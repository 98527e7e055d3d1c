"""Publish one weight version of an RL trainer to every inference engine: target and drafts from one receive."""
