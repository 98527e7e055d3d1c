"""Ways to move flat byte buckets; see `weightsync.transports.base.Transport`."""
