"""An inference engine that needs nothing but torch: target and draft, decoding speculatively, for bench and tests."""
