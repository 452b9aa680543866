"""The learner: turns claimed groups into packed micro-batches, gradients, optimizer steps and checkpoints.

Read `trainer` first (one claim in, one new version out), then `minibatch` and `packing` in the order in which a claim
passes through them.

    minibatch         members of a claim as flat per-token streams, advantages, weights, optimizer steps (numpy)
    packing           samples → rows of a few fixed shapes (numpy)
    shared_prompts    the same for rows that store each prompt once (numpy)
    state             parameters, optimizer state, the optimizer itself, and the frozen reference model
    lora              low-rank adapters on frozen parameters, and their merge
    peft              adapters in the format of Hugging Face's PEFT (no JAX)
    step              loss and gradients of packed rows, the recipe that determines them, ahead-of-time compilation
    step_metrics      training-step metrics, grouped by token age and summed on the device
    critic            the value model with its own optimizer step
    trainer           one claim → one new version; compiled programs: gradients, log-probs, optimizer step
    checkpoint        durable versions on disk, written by orbax
    checkpoint_files  checkpoints as files: versions, checksums, readability (no JAX)
    weights           parameters in a folder that other tools can open (safetensors)
    multihost         a learner that spans several hosts

The learner does not depend on the algorithm. Mask, behavior, proximal and reference log-prob, advantage and age are
streams of numbers, one per token; only `jaxroll.algorithms` interprets them.
"""
