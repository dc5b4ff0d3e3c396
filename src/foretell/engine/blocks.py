"""BlockManager: who owns which KV block, and which full blocks can be shared. Host bookkeeping.

It knows no tensors, no drafters and no requests: a table is a list of block ids, and one id
addresses the target's and the drafter's KV alike. Deciding what to register or whom to preempt is
the scheduler's work.

Invariant: every block but the null block 0 is in exactly one state:
  used  (references > 0: it stands in that many tables),
  idle  (no reference, but its content is known by hash and may be shared; least recent first),
  free  (no reference, no content).
A block with a hash is full and never written again; writes go to blocks of one table only.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b

NULL_BLOCK = 0


def extend_chain(chain: list[bytes], tokens: Sequence[int], block_size: int) -> None:
    """Append the hashes of the full blocks of `tokens` that `chain` does not hold yet.

    A block's hash covers its own tokens and, through its parent's hash, all tokens before it. 128
    bits: two different prefixes never meet in practice.
    """
    for i in range(len(chain), len(tokens) // block_size):
        parent = chain[i - 1] if i else b""
        words = array("q", tokens[i * block_size : (i + 1) * block_size])
        chain.append(blake2b(parent + words.tobytes(), digest_size=16).digest())


class BlockManager:
    """Allocates, shares and recycles `num_blocks` blocks of `block_size` tokens.

    Args:
        num_blocks: how many exist, the null block included.
        block_size: tokens per block.
        prefix_cache: False never shares a block.

    Raises:
        ValueError: fewer than two blocks, or a block without tokens.
    """

    def __init__(self, num_blocks: int, block_size: int, prefix_cache: bool = True) -> None:
        if num_blocks < 2 or block_size < 1:
            raise ValueError(
                f"num_blocks={num_blocks} and block_size={block_size}: at least 2 blocks (one is "
                "the null block) of 1 token are needed; give the KV cache more memory"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self.queries = 0  # tokens looked up in the prefix cache
        self.hits = 0  # tokens found there
        self._references = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._by_hash: dict[bytes, int] = {}
        self._free = list(range(num_blocks - 1, NULL_BLOCK, -1))  # a stack: low ids first
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def usable(self) -> int:
        """Blocks that requests can own."""
        return self.num_blocks - 1

    @property
    def available(self) -> int:
        """Blocks that `alloc` can hand out now: free ones and idle ones."""
        return len(self._free) + len(self._idle)

    @property
    def usage(self) -> float:
        """Share of the usable blocks that stand in a table, between 0 and 1."""
        return 1.0 - self.available / self.usable

    def blocks_for(self, keys: int) -> int:
        """How many blocks hold `keys` key indices."""
        return -(-keys // self.block_size)

    # Owning.

    def alloc(self, count: int) -> list[int]:
        """Take `count` blocks with one reference each; idle ones lose their content."""
        assert 0 <= count <= self.available, f"alloc {count} of {self.available} blocks"
        taken = []
        for _ in range(count):
            block = self._free.pop() if self._free else self._evict()
            self._references[block] = 1
            taken.append(block)
        return taken

    def release(self, table: Sequence[int]) -> None:
        """Give one reference of each block back. The tail of a table is evicted before its head."""
        for block in reversed(table):
            assert self._references[block] > 0, f"block {block} released without a reference"
            self._references[block] -= 1
            if self._references[block] == 0:
                self._retire(block)

    def references(self, block: int) -> int:
        """In how many tables the block stands."""
        return self._references[block]

    def assert_writable(self, blocks: Iterable[int]) -> None:
        """Nobody else sees these blocks: one table, not registered, not the null block."""
        for block in blocks:
            assert block != NULL_BLOCK, "the null block is in a table"
            assert self._references[block] == 1, (
                f"block {block} is to be written but stands in {self._references[block]} tables"
            )
            assert self._hashes[block] is None, f"block {block} is to be written but is registered"

    # Sharing.

    def match(self, tokens: Sequence[int], chain: list[bytes] | None = None) -> list[int]:
        """The longest run of registered blocks at the start of `tokens`; takes no reference.

        At least one token is always left to compute: its logits give the next token.

        Args:
            tokens: all committed tokens of the request.
            chain: the request's block hashes, extended in place so that they are computed once.
        """
        if not self.prefix_cache:
            return []
        chain = [] if chain is None else chain
        extend_chain(chain, tokens, self.block_size)
        found = []
        for hash_ in chain[: (len(tokens) - 1) // self.block_size]:
            block = self._by_hash.get(hash_)
            if block is None:
                break
            found.append(block)
        return found

    def idle_among(self, blocks: Iterable[int]) -> int:
        """How many of the (different) blocks would leave the idle ones if they were held."""
        return sum(self._references[block] == 0 for block in blocks)

    def hold(self, blocks: Sequence[int]) -> None:
        """Take one more reference of each block that `match` found."""
        for block in blocks:
            assert self._hashes[block] is not None, f"block {block} is held but not registered"
            self._idle.pop(block, None)
            self._references[block] += 1

    def count(self, queries: int, hits: int) -> None:
        """Add one look-up to the counters, in tokens."""
        self.queries += queries
        self.hits += hits

    def register(self, block: int, hash_: bytes) -> None:
        """Make a full block findable, unless the same content is registered already."""
        assert self._references[block] > 0, f"block {block} is registered but nobody owns it"
        if not self.prefix_cache or hash_ in self._by_hash or self._hashes[block] is not None:
            return
        self._hashes[block] = hash_
        self._by_hash[hash_] = block

    def forget(self, blocks: Iterable[int]) -> None:
        """Make blocks unfindable: what they hold is not trusted any more."""
        for block in blocks:
            self._drop_hash(block)
            if block in self._idle:
                del self._idle[block]
                self._free.append(block)

    def reset_prefix_cache(self) -> None:
        """Forget all content. What requests compute from now on is the scheduler's to judge."""
        self.forget(tuple(self._by_hash.values()))

    # Proof.

    def check(self, tables: Iterable[Sequence[int]] = ()) -> None:
        """Assert every invariant, given the tables of all requests that own blocks."""
        expected: Counter[int] = Counter()
        for table in tables:
            assert len(set(table)) == len(table), f"a block stands twice in one table: {table}"
            expected.update(table)
        assert expected[NULL_BLOCK] == 0, "the null block is in a table"
        for block, references in enumerate(self._references):
            assert references == expected[block], (
                f"block {block} has {references} references but stands in {expected[block]} tables"
            )
        free, idle = set(self._free), set(self._idle)
        used = {block for block, references in enumerate(self._references) if references}
        assert len(free) == len(self._free), "a block is free twice"
        assert len(free) + len(idle) + len(used) == self.usable, "a block is lost or in two states"
        assert free | idle | used == set(range(1, self.num_blocks)), "a block is lost"
        for block, hash_ in enumerate(self._hashes):
            assert hash_ is None or self._by_hash.get(hash_) == block, f"block {block}: stray hash"
            assert (hash_ is not None) or block not in idle, f"idle block {block} has no content"
            assert (hash_ is None) or block not in free, f"free block {block} has a hash"
        assert len(self._by_hash) == sum(h is not None for h in self._hashes), (
            "a hash without block"
        )

    def _evict(self) -> int:
        block, _ = self._idle.popitem(last=False)
        self._drop_hash(block)
        return block

    def _retire(self, block: int) -> None:
        if self._hashes[block] is None:
            self._free.append(block)
        else:
            self._idle[block] = None

    def _drop_hash(self, block: int) -> None:
        hash_ = self._hashes[block]
        if hash_ is not None:
            del self._by_hash[hash_]
            self._hashes[block] = None
