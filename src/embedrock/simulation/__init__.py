"""What a table costs that many ranks share, told before there are so many: `simulate`."""

from __future__ import annotations

from embedrock.simulation.model import Cluster, Compute, Load, Simulation, calibrated, simulate

__all__ = ["Cluster", "Compute", "Load", "Simulation", "calibrated", "simulate"]
