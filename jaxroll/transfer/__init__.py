"""Parameters from the learner's mesh to a sampler's, whatever the two meshes are.

    publish.Publisher   params → snapshot (device copy, host pieces, manifest) → channel
    receive.Receiver    manifest → plan → slices → digests checked → Staged.place() → params on this mesh

`plan` and `digest` are pure; only `snapshot` reads device memory, only `receive` writes it.
"""
