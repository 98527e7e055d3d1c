"""The engine side: routing, receiving and the control channel; see `weightsync.engine.base`."""
