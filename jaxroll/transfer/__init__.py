"""Weight transfer: moves parameters from the learner's mesh to a sampler's mesh of any shape, with checksums.

Read `publish` (the learner's end) and `receive` (the sampler's end) first.

    publish.Publisher   params → host snapshot (device copy, host pieces, manifest) → channel
    receive.Receiver    manifest → plan → slices → checksums → Staged.place() → params on this mesh

`plan` and `manifest` are pure (except the dtype cast). `channels` defines the interface of a channel; `channel_tcp`,
`channel_tensorstore` and `channel_device` implement it. Only `host_snapshot` reads device memory, only `receive` and
`channel_device` write it.
"""
