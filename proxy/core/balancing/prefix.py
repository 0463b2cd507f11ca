"""Prompts go where the longest beginning of them was seen last, as far as the load allows.

An approximate radix tree: a prompt is cut into blocks, and a block's id is a hash over the block and the id before it,
so that an id stands for the whole beginning up to its end. What an engine is believed to have cached is a set of such
ids, the least recently used given up first, which is how the engine's own prefix cache goes. Ids are `hash` of bytes,
which is keyed per process: a client cannot make two prompts collide.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from proxy.core.balancing.base import C
from proxy.core.balancing.limit import Limit
from proxy.core.balancing.spread import LeastInflight

BLOCK_BYTES = 256
"""Bytes of a block: some 64 tokens of text or of ids, four blocks of vLLM's cache; short beginnings are not worth a
move, and a block costs about 0.3 us and 150 bytes."""

KEPT_PROMPTS = 2
"""Prompts that stay for each request that runs on where the caches were emptied: some of the newest have ended, some
that run are older. What stays too long draws prompts to where nothing is, as it would be elsewhere."""


class Prefix:
    """Longest cached beginning first, unless its engine is too busy.

    The engine with the longest match takes the request if the match is worth it (``min_match`` of what was looked at)
    and if it is not too busy (see `proxy.core.balancing.limit`). Otherwise the least busy engine takes it.

    Args:
        prompt_bytes: bytes of a prompt that are looked at.
        max_blocks: blocks remembered of all engines together.
        margin: times the load of the others above which an engine's prompts go elsewhere.
        slack: requests per unit of weight on top of that.
        min_match: share of the prompt that must be cached for it to count, 0 to 1.
        block_bytes: bytes of a block.
    """

    def __init__(
        self,
        *,
        prompt_bytes: int,
        max_blocks: int,
        margin: float,
        slack: float,
        min_match: float,
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        self.prompt_bytes = prompt_bytes
        self._max_blocks = max_blocks
        self._limit = Limit(margin=margin, slack=slack)
        self._min_match = min_match
        self._block = block_bytes
        self._spread = LeastInflight()
        # Of each engine its blocks, the least recently used first, with the number of the prompt that used them last.
        self._cached: dict[str, OrderedDict[int, int]] = {}
        self._prompts: dict[str, int] = {}
        # Engines as bits, so that one step down the tree is one `and`, however many engines hold the block.
        self._slots: dict[str, int] = {}
        self._free: list[int] = []
        self._holders: dict[int, int] = {}
        self._size = 0

    def __len__(self) -> int:
        """Blocks remembered, of all engines together."""
        return self._size

    def select(self, candidates: Sequence[C], key: bytes | None, now: float, prompt: bytes = b"") -> C:
        """The engine that has most of the prompt, or the least busy one."""
        blocks = self._blocks(prompt)
        if not blocks:
            return self._spread.select(candidates, key, now)
        chosen = self._longest(candidates, blocks)
        if chosen is None:
            chosen = self._spread.select(candidates, key, now)
        self._remember(chosen.id, blocks, len(candidates))
        return chosen

    def _blocks(self, prompt: bytes) -> list[int]:
        """Ids of the whole blocks of a prompt; what is left of it is too short to be worth a place."""
        size = self._block
        out: list[int] = []
        last = 0
        for at in range(0, min(len(prompt), self.prompt_bytes) - size + 1, size):
            last = hash((last, prompt[at : at + size]))
            out.append(last)
        return out

    def _longest(self, candidates: Sequence[C], blocks: Sequence[int]) -> C | None:
        slots = self._slots
        have = 0
        for candidate in candidates:
            have |= slots.get(candidate.id, 0)
        holders = self._holders
        matched = 0
        for block in blocks:
            left = have & holders.get(block, 0)
            if not left:
                break
            have = left
            matched += 1
        if not matched or matched < self._min_match * len(blocks):
            return None
        best = [candidate for candidate in candidates if slots.get(candidate.id, 0) & have]
        chosen = min(best, key=lambda one: one.inflight / one.weight)
        return None if self._limit.over(chosen, candidates) else chosen

    def _remember(self, engine_id: str, blocks: Sequence[int], engines: int) -> None:
        cached = self._cached.get(engine_id)
        if cached is None:
            cached = self._cached[engine_id] = OrderedDict()
            self._slots[engine_id] = self._free.pop() if self._free else 1 << len(self._slots)
        slot = self._slots[engine_id]
        self._prompts[engine_id] = number = self._prompts.get(engine_id, 0) + 1
        holders = self._holders
        # From the end to the beginning: of a prompt its end is given up first, as an engine frees it.
        for block in reversed(blocks):
            if block in cached:
                cached.move_to_end(block)
            else:
                holders[block] = holders.get(block, 0) | slot
                self._size += 1
            cached[block] = number
        share = max(len(blocks), self._max_blocks // engines)
        while len(cached) > share:
            self._drop(cached.popitem(last=False)[0], slot)

    def _drop(self, block: int, slot: int) -> None:
        left = self._holders[block] & ~slot
        if left:
            self._holders[block] = left
        else:
            del self._holders[block]
        self._size -= 1

    def finish(self, key: bytes) -> bool:  # noqa: ARG002 - the form of a policy
        """Sessions are not remembered; prompts tell where they were."""
        return False

    def forget(self, engine_id: str) -> None:
        """None of its blocks is there any more."""
        slot = self._slots.pop(engine_id, 0)
        self._prompts.pop(engine_id, None)
        if slot:
            for block in self._cached.pop(engine_id):
                self._drop(block, slot)
            self._free.append(slot)

    def emptied(self, engine_id: str, running: int = 0) -> None:
        """Its caches are empty, but what runs there is computed again: the newest prompts stay."""
        cached = self._cached.get(engine_id)
        if not running or not cached:
            self.forget(engine_id)
            return
        slot = self._slots[engine_id]
        oldest = self._prompts[engine_id] - running * KEPT_PROMPTS
        while cached:
            block, number = next(iter(cached.items()))
            if number > oldest:
                break
            del cached[block]
            self._drop(block, slot)
