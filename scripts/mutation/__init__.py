"""Planted faults: one-line mutations of the library, and whether the sweep and the simulation catch them."""
