"""The first part of dQ in calls without turns (claims.cuh), explored: see ring_model.py.

Writers of several thread blocks add to the same blocks of queries. Who comes first stores its part.
"""

from __future__ import annotations

import pytest
from ring_model import (
    Barrier,
    Buffer,
    Model,
    Role,
    Step,
    arrive,
    assert_sound,
    explore,
    finish,
    publish,
    read,
    together,
    wait,
    wait_before,
    write,
)


class Claims:
    """Step n is a block of queries: its dQ in global memory, and its ticket.

    The writers are first in turn, block by block: so each waits for the others in some blocks, and
    they wait for it in others. A writer is at most `lead` blocks ahead of another, since a tile has
    an end. `missing` is what a mutant lacks.
    """

    def __init__(self, writers: int, lead: int, missing: str = "") -> None:
        self.writers, self.missing = writers, missing
        every = range(writers)
        self.dq = [Buffer(f"dQ in shared memory {i}", 1) for i in every]
        self.full = [Barrier(f"dq_full {i}", 1) for i in every]
        self.empty = [Barrier(f"dq_empty {i}", 1) for i in every]
        self.part = Buffer("first part", lead)
        self.stored = Barrier("ticket", lead, counts=True)
        self.added = Barrier("added", lead, writers - 1, counts=True)
        roles: list[Role] = []
        for i in every:
            roles += [Role(f"consumer {i}", lambda n, _, i=i: self.stage(i, n))]
            roles += [Role(f"writer {i}", lambda n, first, i=i: self.add(i, n, first), 0)]
        barriers = (*self.full, *self.empty, self.stored, self.added)
        self.model = Model(tuple(roles), (*self.dq, self.part), barriers)

    def stage(self, i: int, n: int) -> Step:
        yield together(wait_before(self.empty[i], n), write(self.dq[i], n))
        yield publish(self.full[i], n, writes=self.dq[i])

    def add(self, i: int, n: int, first: int) -> Step:
        """`first`: the writer that comes first to block n."""
        yield wait(self.full[i], n, reads=self.dq[i])
        if i == first:
            yield wait_before(self.added, n)  # the memory is a new block's
            yield write(self.part, n)
            yield arrive(self.empty[i], n, reads=self.dq[i])
            if self.missing == "complete":  # only read from shared memory
                yield arrive(self.stored, n)
                yield finish(self.part, n)
            else:
                yield publish(self.stored, n, writes=self.part)
        else:
            if self.missing != "await":
                yield wait(self.stored, n, reads=self.part)
            yield read(self.part, n)
            yield together(arrive(self.empty[i], n, reads=self.dq[i]), arrive(self.added, n))
        return (first + 1) % self.writers


@pytest.mark.parametrize(("writers", "lead"), [(2, 1), (2, 3), (3, 2)])
def test_the_first_part_is_stored_before_others_add(writers, lead):
    assert_sound(Claims(writers, lead).model)


@pytest.mark.parametrize("missing", ["await", "complete"])
def test_claims_need_the_wait_and_the_complete_store(missing):
    result = explore(Claims(2, 2, missing).model)
    print(result)
    assert "first part" in result.failure
