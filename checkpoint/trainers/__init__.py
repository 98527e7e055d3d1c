"""Trainers whose own checkpoint managers this package replaces: one module per trainer, imported by that trainer.

`verl`: its Megatron checkpoint manager.
"""

__all__: list[str] = []
