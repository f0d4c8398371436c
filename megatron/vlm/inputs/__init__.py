"""Loading of the plan's packs as micro-batches."""
