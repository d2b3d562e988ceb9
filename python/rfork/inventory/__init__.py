"""The inventory: everything in a model that inference can read, found by looking, not by asking `named_parameters()`.

`Inventory.note()` walks the model once, when the loader returns, and keeps the structure: accessor paths, no tensors.
`Inventory.resolve()` follows the paths again and gives a `ResolvedShard`: manifest, addresses and the live tensors.
"""

from rfork.inventory.inventory import Inventory
from rfork.inventory.rules import InventoryRules
from rfork.inventory.shard import ResolvedShard

__all__ = ["Inventory", "InventoryRules", "ResolvedShard"]
