"""Tests of `training_hooks`."""
