"""From claims to parameters: samples → packed micro-batches → gradients → one optimizer step → checkpoints.

    samples     what a claim's members say, as flat per-token streams (numpy)
    credit      advantages, by the estimator of the config (numpy)
    minibatch   shaped rewards, aggregation weights and the split of a claim into optimizer steps (numpy)
    packing     samples → rows of a few fixed shapes (numpy)
    state       parameters and optimizer state, born sharded
    lora        adapters on frozen parameters, and their merge
    optimizer   AdamW, clipping, learning-rate schedule
    step        the compiled programs: accumulate gradients, recompute log-probs, apply
    reference   the frozen model that a KL penalty or a preference compares with
    critic      the second model that says what is to be earned, and its own optimizer step
    statistics  what a step tells about itself, summed on the device
    trainer     one claim → one new version
    checkpoint  durable versions on disk

The learner is blind to the algorithm: mask, behaviour, proximal and reference log-prob, advantage and age are streams
of numbers, one per token; `jaxroll.algorithms` alone knows what they mean.
"""
