"""How the programs of experts_hopper.py claim items, and how a program's warps share them.

`P` is an ExpertsConstants; `tables` are the lists of Groups; `queue` has the items that the loading
warps send to the others, and a barrier for each.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

# Items in the queue. Loaders are at most one item ahead, as the ring is no longer than an item:
# they never overwrite an unread one.
QUEUE = gl.constexpr(4)


@gluon.jit
def locate_item(item, tables, tiles, P: gl.constexpr):
    """Strip, expert, first place and end of an item; strip -1 if there is none. Half strips of tall
    items are numbered from NUM_STRIPS on."""
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
def send_item(queue, number, found):
    """Sends the program's item after `number` to the other warps."""
    values, made = queue
    one: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    slot = values.index(number % QUEUE)
    for i in gl.static_range(4):
        slot.slice(i, 1).store(gl.full([1], found[i], gl.int32, one))
    mbarrier.arrive(made.index(number % QUEUE), count=1)


@gluon.jit
def receive_item(queue, number):
    values, made = queue
    one: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    mbarrier.wait(made.index(number % QUEUE), number // QUEUE & 1)
    slot = values.index(number % QUEUE)
    strip = gl.max(slot.slice(0, 1).load(one), 0)
    expert = gl.max(slot.slice(1, 1).load(one), 0)
    place = gl.max(slot.slice(2, 1).load(one), 0)
    end = gl.max(slot.slice(3, 1).load(one), 0)
    return strip, expert, place, end
