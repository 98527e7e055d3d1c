"""Tests of `weightsync.engine`."""
