"""Logical axes to mesh axes: the only place that builds meshes and knows which backend this is."""
