"""The lifecycle drawn: pictures and data made from the declared tables. May import `fsm`'s tables, nothing else."""
