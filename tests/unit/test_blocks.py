"""BlockManager: every block is used, idle or free, and a shared prefix is the right one."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretell.engine.blocks import NULL_BLOCK, BlockManager, extend_chain

SIZE = 4


def filled(blocks: BlockManager, tokens: list[int]) -> list[int]:
    """A table for `tokens` whose full blocks are registered; matched blocks are shared."""
    chain: list[bytes] = []
    hit = blocks.match(tokens, chain)
    blocks.hold(hit)
    table = [*hit, *blocks.alloc(blocks.blocks_for(len(tokens)) - len(hit))]
    extend_chain(chain, tokens, blocks.block_size)
    for block, hash_ in zip(table, chain, strict=False):
        blocks.register(block, hash_)
    return table


def test_the_null_block_is_never_handed_out():
    blocks = BlockManager(9, SIZE)
    table = blocks.alloc(8)
    assert sorted(table) == list(range(1, 9))
    assert NULL_BLOCK not in table
    assert blocks.available == 0
    assert blocks.usage == 1.0
    blocks.check([table])


def test_more_than_available_is_an_assertion_with_the_numbers():
    blocks = BlockManager(4, SIZE)
    with pytest.raises(AssertionError, match="alloc 4 of 3"):
        blocks.alloc(4)


def test_releasing_twice_is_an_assertion():
    blocks = BlockManager(4, SIZE)
    table = blocks.alloc(1)
    blocks.release(table)
    with pytest.raises(AssertionError, match="without a reference"):
        blocks.release(table)


@pytest.mark.parametrize(("count", "size"), [(1, 4), (0, 4), (8, 0)])
def test_a_pool_without_room_is_refused(count, size):
    with pytest.raises(ValueError, match=f"num_blocks={count} and block_size={size}"):
        BlockManager(count, size)


def test_a_second_prompt_shares_the_full_blocks_by_reference():
    blocks = BlockManager(16, SIZE)
    first = filled(blocks, list(range(10)))
    assert blocks.match([*range(8), 99, 98]) == first[:2]
    second = filled(blocks, [*range(8), 99, 98])
    assert second[:2] == first[:2]
    assert second[2] != first[2]
    assert [blocks.references(b) for b in first] == [2, 2, 1]
    blocks.check([first, second])


def test_at_least_one_token_is_left_to_compute():
    blocks = BlockManager(16, SIZE)
    table = filled(blocks, list(range(8)))
    assert blocks.match(list(range(8))) == table[:1]
    assert blocks.match(list(range(9))) == table[:2]
    assert blocks.match(list(range(4))) == []
    assert blocks.match([0]) == []


def test_a_block_is_found_only_behind_the_same_beginning():
    blocks = BlockManager(16, SIZE)
    filled(blocks, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert blocks.match([9, 9, 9, 9, 5, 6, 7, 8, 9]) == []
    assert blocks.match([5, 6, 7, 8, 9]) == []


def test_half_full_blocks_are_not_shared():
    blocks = BlockManager(16, SIZE)
    table = filled(blocks, [1, 2, 3, 4, 5, 6])
    assert blocks.match([1, 2, 3, 4, 5, 6, 7, 8, 9]) == table[:1]


def test_content_outlives_its_request_until_the_room_is_needed():
    blocks = BlockManager(6, SIZE)
    table = filled(blocks, list(range(13)))
    blocks.release(table)
    assert blocks.available == 5
    assert blocks.match(list(range(13))) == table[:3]
    blocks.release(blocks.alloc(2))  # two free blocks: nothing is evicted
    assert blocks.match(list(range(13))) == table[:3]
    taken = blocks.alloc(3)
    assert blocks.match(list(range(13))) == table[:2], "the tail goes first"
    blocks.release(taken)
    blocks.check()


def test_the_least_recently_released_content_is_evicted_first():
    blocks = BlockManager(5, SIZE)
    old = filled(blocks, [1, 1, 1, 1])
    new = filled(blocks, [2, 2, 2, 2])
    blocks.release(old)
    blocks.release(new)
    blocks.hold(blocks.match([1, 1, 1, 1, 0]))
    blocks.release(old)
    taken = blocks.alloc(3)
    assert blocks.match([1, 1, 1, 1, 0]) == old
    assert blocks.match([2, 2, 2, 2, 0]) == []
    blocks.check([taken])


def test_equal_content_is_registered_once():
    blocks = BlockManager(8, SIZE)
    chain: list[bytes] = []
    extend_chain(chain, [1, 2, 3, 4], SIZE)
    first, second = blocks.alloc(2)
    blocks.register(first, chain[0])
    blocks.register(second, chain[0])
    assert blocks.match([1, 2, 3, 4, 5]) == [first]
    blocks.release([second])
    assert blocks.match([1, 2, 3, 4, 5]) == [first]
    blocks.check([[first]])


def test_shared_or_registered_blocks_are_not_writable():
    blocks = BlockManager(8, SIZE)
    table = filled(blocks, [1, 2, 3, 4, 5])
    blocks.assert_writable(table[1:])
    with pytest.raises(AssertionError, match="is registered"):
        blocks.assert_writable(table)
    blocks.hold(table[:1])
    with pytest.raises(AssertionError, match="stands in 2 tables"):
        blocks.assert_writable(table)
    with pytest.raises(AssertionError, match="null block"):
        blocks.assert_writable([NULL_BLOCK])


def test_forgotten_blocks_are_not_found_and_keep_their_owners():
    blocks = BlockManager(8, SIZE)
    table = filled(blocks, list(range(9)))
    blocks.forget(table)
    assert blocks.match(list(range(9))) == []
    blocks.check([table])
    blocks.release(table)
    assert blocks.available == 7
    blocks.check()


def test_a_reset_empties_the_cache_and_keeps_the_tables():
    blocks = BlockManager(16, SIZE)
    kept, left = filled(blocks, list(range(9))), filled(blocks, [7] * 9)
    blocks.release(left)
    blocks.reset_prefix_cache()
    assert blocks.match(list(range(9))) == []
    assert blocks.match([7] * 9) == []
    blocks.check([kept])
    blocks.release(kept)
    assert blocks.available == 15


def test_without_a_prefix_cache_nothing_is_found():
    blocks = BlockManager(16, SIZE, prefix_cache=False)
    table = filled(blocks, list(range(9)))
    assert blocks.match(list(range(9))) == []
    blocks.release(table)
    blocks.check()
    assert blocks.available == 15


def test_a_chain_extended_in_steps_equals_one_made_at_once():
    tokens = list(range(23))
    once: list[bytes] = []
    extend_chain(once, tokens, SIZE)
    steps: list[bytes] = []
    for stop in (3, 9, 9, 16, 23):
        extend_chain(steps, tokens[:stop], SIZE)
    assert steps == once
    assert len(once) == 5
    assert len(set(once)) == 5


@pytest.mark.parametrize(
    "damage",
    [
        lambda b, t: b._references.__setitem__(t[0], 2),
        lambda b, t: b._free.pop(),
        lambda b, t: b._free.append(b._free[0]),
        lambda b, t: b._free.append(t[0]),
        lambda b, t: b._hashes.__setitem__(t[0], None),
        lambda b, t: b._by_hash.clear(),
        lambda b, t: t.append(t[0]),
        lambda b, t: t.append(NULL_BLOCK),
        lambda b, t: t.pop(),
    ],
)
def test_check_sees_any_damage(damage):
    blocks = BlockManager(8, SIZE)
    table = filled(blocks, [1, 2, 3, 4, 5])
    blocks.check([table])
    damage(blocks, table)
    with pytest.raises(AssertionError):
        blocks.check([table])


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 1 << 30), count=st.integers(3, 20), size=st.integers(1, 5))
def test_random_use_keeps_every_invariant_and_never_shares_wrong_content(seed, count, size):
    rng = random.Random(seed)
    blocks = BlockManager(count, size)
    tables: list[list[int]] = []
    content: dict[int, tuple[int, ...]] = {}  # block -> all tokens up to its end
    for _ in range(60):
        kind = rng.random()
        if kind < 0.55:
            tokens = [rng.randint(0, 1) for _ in range(rng.randint(1, 3 * size + 2))]
            hit = blocks.match(tokens)
            for i, block in enumerate(hit):
                assert content[block] == tuple(tokens[: (i + 1) * size])
            assert len(hit) * size < len(tokens)
            need = blocks.blocks_for(len(tokens)) - len(hit)
            if need <= blocks.available - blocks.idle_among(hit):
                table = filled(blocks, tokens)
                assert table[: len(hit)] == hit
                for i, block in enumerate(table[len(hit) :], start=len(hit)):
                    content[block] = tuple(tokens[: (i + 1) * size])
                tables.append(table)
        elif tables and kind < 0.95:
            blocks.release(tables.pop(rng.randrange(len(tables))))
        elif tables and kind < 0.98:
            blocks.forget(rng.choice(tables))
        else:
            blocks.reset_prefix_cache()
        blocks.check(tables)
    for table in tables:
        blocks.release(table)
    blocks.check()
    assert blocks.available == blocks.usable
