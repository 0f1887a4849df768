"""Memory: what lies where while a plan runs, and where the memory comes from.

Read in this order: `lifetimes` (when values are surely not alive), `sweep` and `by_size` (places for them), `planner`
(the best of these), `check` (whether a plan is legal), `pool` (blocks and arenas), `views` (tensors in them).
"""
