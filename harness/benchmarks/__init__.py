"""asv's benchmarks. They hold no timing logic: :mod:`harness.session` measures, these hand its results to asv.

asv runs ``setup_cache`` in a process of its own, and forks one for each parameter of each benchmark from a server that
has imported these modules. So nothing here imports torch or touches a device, except inside ``setup_cache``.
"""
