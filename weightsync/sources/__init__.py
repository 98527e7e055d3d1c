"""What the trainer side publishes from; see `weightsync.sources.base.Source`."""
