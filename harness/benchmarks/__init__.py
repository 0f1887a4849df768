"""asv's benchmarks. They hold no timing logic: :mod:`harness.session` measures, these hand its results to asv."""
