"""The learner: turns claimed groups into packed micro-batches, gradients, optimizer steps and checkpoints.

Read `trainer` first (one claim in, one new version out), then `minibatch`, `packing` and `step` in the order in which
a claim passes through them.

    minibatch         members of a claim as flat per-token streams, advantages, weights, optimizer steps (numpy)
    packing           samples → rows of a few fixed shapes (numpy)
    shared_prompts    the same for rows that store each prompt once (numpy)
    state             parameters, optimizer state, the optimizer itself, and the frozen reference model
    lora              low-rank adapters on frozen parameters, and their merge
    peft              adapters in the format of Hugging Face's PEFT (no JAX)
    step              compiled programs: accumulate gradients, recompute log-probs, apply an optimizer step
    step_metrics      training-step metrics, grouped by token age and summed on the device
    critic            the value model with its own optimizer step
    compiles          ahead-of-time compilation and the count of compilations
    trainer           one claim → one new version
    checkpoint        durable versions on disk, written by orbax
    checkpoint_files  checkpoints as files: versions, checksums, readability (no JAX)
    weights           parameters in a folder that other tools can open (safetensors)
    multihost         a learner that spans several hosts

The learner does not depend on the algorithm. Mask, behaviour, proximal and reference log-prob, advantage and age are
streams of numbers, one per token; only `jaxroll.algorithms` interprets them.
"""
