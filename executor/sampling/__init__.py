"""What nodes attend to: all neighbours, few of them, or others that the graph does not have.

`candidates.py` prepares a graph once. `draws.py` and `projection.py` choose few of each row's edges in each step, at
places that `plan.py` found, with `ranking.py` where they rank edges; `walks.py` finds nodes that walks visit.
`stored.py` keeps a choice, `structures.py` invents edges, `join.py` joins edge sets, and `sampler.py` does what a
`NeighbourSpec` says. Choices depend on (seed, step, global ids) alone: not on the partition, the order of edges in
memory, the device or the number of ranks.
"""
