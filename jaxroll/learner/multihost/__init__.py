"""A learner that spans several hosts: process 0 leads, the others follow."""
