"""The client side of a fork: find a seed, take a lease, pull, verify."""
