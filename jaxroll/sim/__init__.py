"""Simulation of runs: the real role loops on a virtual clock, with cost models for devices and environments."""
