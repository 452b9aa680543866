"""Weight transfer: moves parameters from the learner's mesh to a sampler's mesh of any shape, with checksums.

Read `ends` first.

    ends.Publisher   params → host snapshot (device copy, host pieces, manifest) → channel
    ends.Receiver    manifest → plan → slices → checksums → Staged.place() → params on this mesh

`manifest` is pure (except the dtype cast). `channels` defines the interface of a channel;
`channel_tcp`, `channel_tensorstore` and `channel_device` implement it. `channel_shm` lets readers on the sender's host
map what `channel_tcp` sends. `shelves` keeps the versions that a publisher or a relay serves over `channel_tcp`. Only
`channel_device` (host snapshots) reads device memory, only `ends` and `channel_device` write it.
"""
