"""The executor of the core's plans on this rank's tensors.

    rank_plan.py        a plan as this rank carries it out: numbers, cached, and constants of compiled code
    amaxes.py           the amaxes of many arrays, reduced over the ranks that share them
    quantize.py         parts of weights, and of operands of products, quantized as parts of the whole
    gather.py           the two halves of a gather; FSDP2 itself sends and receives between them
    reduce_scatter.py   FSDP2's reduce-scatter of gradients, as codes
    shard.py            the part that a rank of a tensor-parallel group holds

NumPy's executor, which this one is held against, is `blockfp.sharding.simulate`.
"""
