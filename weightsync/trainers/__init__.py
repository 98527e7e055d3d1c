"""Trainers that call weightsync through an interface of their own: one module per trainer, imported by that trainer.

`verl`: a backend of verl's `CheckpointEngineRegistry`.
"""

__all__: list[str] = []
