"""An inference engine that needs nothing but torch: a target and a draft, decoding speculatively, for bench and tests."""
