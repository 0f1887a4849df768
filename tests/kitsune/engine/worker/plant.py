"""Plants what is in `planted`; to be imported by a worker alone."""

from tests.kitsune.engine.worker.planted import plant

plant()
