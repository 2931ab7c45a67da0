"""Which items the programs of experts_hopper.py take, and how a program's warps agree on them.

`P` is a Plan of experts_hopper.py; `tables` are the lists of its Groups; `told` what the loading
warps tell the others, and a barrier for each such message.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

# Items that the loaders tell of: at most an item ahead, as the ring is no longer than an item, they
# never overwrite what was not heard.
TOLD = gl.constexpr(4)


@gluon.jit
def look(item, tables, tiles, P: gl.constexpr):
    """Strip, expert, first place and last place's end of an item; -1 where there is none. Halves of
    strips, for tall items, are numbered from NUM_STRIPS on."""
    _, first_place, count, tile_expert, tile_place, _ = tables
    there = item < tiles * P.NUM_STRIPS
    first = item // (P.GROUP * P.NUM_STRIPS) * P.GROUP
    size = gl.maximum(gl.minimum(tiles - first, P.GROUP), 1)
    within = item % (P.GROUP * P.NUM_STRIPS)
    tile = first + within % size
    expert = gl.load(tile_expert + tile, mask=there, other=0)
    place = gl.load(tile_place + tile, mask=there, other=0)
    begin = gl.load(first_place + expert)
    end = begin + gl.load(count + expert)
    strip = within // size
    if P.TALL:
        rest = end - place
        last = (place > begin) & (rest <= 64)
        tall = last | (rest > 128) & (rest <= 192)
        strip = gl.where(tall, P.NUM_STRIPS + 2 * strip + last.to(gl.int32), strip)
        place = gl.where(last, place - 128, place)
    return gl.where(there, strip, -1), expert, place, end


@gluon.jit
def tell(told, number, found):
    """The others what the loaders found out about a program's item after `number`."""
    values, made = told
    one: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    slot = values.index(number % TOLD)
    for i in gl.static_range(4):
        slot.slice(i, 1).store(gl.full([1], found[i], gl.int32, one))
    mbarrier.arrive(made.index(number % TOLD), count=1)


@gluon.jit
def hear(told, number):
    values, made = told
    one: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    mbarrier.wait(made.index(number % TOLD), number // TOLD & 1)
    slot = values.index(number % TOLD)
    strip = gl.max(slot.slice(0, 1).load(one), 0)
    expert = gl.max(slot.slice(1, 1).load(one), 0)
    place = gl.max(slot.slice(2, 1).load(one), 0)
    end = gl.max(slot.slice(3, 1).load(one), 0)
    return strip, expert, place, end
