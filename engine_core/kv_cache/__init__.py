"""Which KV block holds what: block identity, the pool and its free queue, and each request's block table.

Knows nothing of models and tensors; a block is its id.
"""

from .block import FreeKVCacheBlockQueue, KVCacheBlock
from .block_hash import BlockHasher
from .block_pool import BlockPool
from .manager import KVCacheManager
from .prefix_hit import PrefixHit
from .residency import BlockResidency

__all__ = [
    "BlockHasher",
    "BlockPool",
    "BlockResidency",
    "FreeKVCacheBlockQueue",
    "KVCacheBlock",
    "KVCacheManager",
    "PrefixHit",
]
