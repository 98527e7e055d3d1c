"""`weightsync bench`: what a publish costs, beside its limit and today's other ways."""
