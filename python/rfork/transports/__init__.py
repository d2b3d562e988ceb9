"""Transports: how bytes move. `memory` is the reference, `mooncake` the product, `collective` the broadcast backend."""
