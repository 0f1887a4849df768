"""From tasks and their costs to a schedule: which task runs when, on which stream, and who waits for whom."""

from kitsune.schedule.check import check
from kitsune.schedule.live_bytes import peak_bytes
from kitsune.schedule.scheduler import DataflowScheduler
from kitsune.schedule.simulate import Simulation, simulate

__all__ = ["DataflowScheduler", "Simulation", "check", "peak_bytes", "simulate"]
