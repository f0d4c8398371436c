"""Packing of samples under several caps, and lower bounds on the number of packs."""
