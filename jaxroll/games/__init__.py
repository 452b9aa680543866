"""Worlds as rules: what an environment plays and a teacher shows. Pure functions of a state and of random numbers."""
