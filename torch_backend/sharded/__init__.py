"""The executor of the core's plans on this rank's tensors.

    rank_plan.py        one rank's view of a plan: cached numbers, constants in compiled code
    quantize.py         quantizes shards of weights and of operands as parts of the whole; reduces shared amaxes
    gather.py           pads before and joins after a gather; FSDP2 communicates by itself in between
    reduce_scatter.py   FSDP2's reduce-scatter of gradients as codes

`blockfp.sharding.simulate` is NumPy's executor, the reference for tests.
"""
