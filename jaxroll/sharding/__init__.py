"""Sharding: device meshes, the rules from logical axes to mesh axes, and arrays over several processes.

Read `layout` first (meshes and rules; the only module that builds meshes), then `placing` (between host and devices).
"""
