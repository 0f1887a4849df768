"""The meaning of a captured ATen graph: what aliases what, what is written, how long values live."""
