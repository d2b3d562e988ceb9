"""The seed side of a fork: a rank publishes its shards, its node's main process grants leases on them."""
