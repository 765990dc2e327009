"""The route of tokens to their experts and back, across a mesh axis or within one rank.

Received rows are in the order of `blockfp.sharding.dispatching`: by expert, rank, token. Every step is a gather with
precomputed indices, so no sum depends on an order, in either direction.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from ..implementations import choice, explicit
from .tiles import gather_rows


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("fits", "order", "place", "sent", "received", "there", "back", "arrived", "left"),
    meta_fields=("tokens", "choices", "axis"),
)
@dataclass(frozen=True)
class Route:
    """The route of one rank's tokens.

    A pair is one of a token's choices; pairs are numbered token by token. Sorted pairs are ordered by expert.

    Attributes:
        fits: see `Received`.
        order: int32 [pairs], the pair at each sorted position.
        place: int32 [pairs], the sorted position of each pair.
        sent, received: int32 [ranks], rows for and from each rank.
        there, back: int32 [ranks], offset of this rank's rows among those that each rank receives, on the way there and back.
        arrived: int32 [bound], the arrival number of each row in expert order; -1 for none.
        left: int32 [bound], the inverse.
        tokens, choices: tokens on this rank, and experts per token.
        axis: the mesh axis, or None.
    """

    fits: jax.Array
    order: jax.Array
    place: jax.Array
    sent: jax.Array
    received: jax.Array
    there: jax.Array
    back: jax.Array
    arrived: jax.Array
    left: jax.Array
    tokens: int
    choices: int
    axis: str | None

    @classmethod
    @partial(jax.jit, static_argnums=(0, 2, 3, 4))
    def of(cls, chosen: jax.Array, experts: int, axis: str | None, bound: int) -> tuple[Route, jax.Array]:
        """Returns the route of tokens with these choices, and the rows per expert of this rank, int32.

        `chosen` is int32 [tokens, choices], -1 for none; `experts` counts all ranks' experts, which `axis` divides; `bound` is
        the maximum number of rows per rank.
        """
        tokens, choices = chosen.shape
        pairs = chosen.reshape(-1)
        known = (pairs >= 0) & (pairs < experts)
        pairs = jnp.where(known, pairs, experts)
        order = jnp.argsort(pairs, stable=True).astype(jnp.int32)
        place = jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=jnp.int32), unique_indices=True)
        own = jnp.bincount(pairs, length=experts).astype(jnp.int32)
        wrong = ((chosen.reshape(-1) != -1) & ~known).any().astype(jnp.int32)
        ranks, rank, counts = 1, 0, jnp.append(own, wrong)[None]
        if axis is not None:
            ranks, rank = lax.axis_size(axis), explicit.axis_index(axis)
            counts = lax.all_gather(counts[0], axis)
        counts, wrong = counts[:, :-1].reshape(ranks, ranks, -1), counts[:, -1]
        # [from, to], and the offsets of each rank's rows among those that another rank receives.
        rows = counts.sum(axis=-1)
        fits = (rows.sum(axis=0) <= bound).all() & (wrong == 0).all()
        counts, rows = jnp.where(fits, counts, 0), jnp.where(fits, rows, 0)
        there, back = _before(rows, axis=0)[rank], _before(rows, axis=1)[:, rank]
        mine = counts[:, rank]
        # A segment holds one rank's rows for one expert: rows arrive by rank and are stored by expert.
        arrived = _segments(mine.T.reshape(-1), _starts(mine).T.reshape(-1), bound)
        left = _segments(mine.reshape(-1), _starts(mine.T).T.reshape(-1), bound)
        route = cls(fits, order, place, rows[rank], rows[:, rank], there, back, arrived, left, tokens, choices, axis)
        return route, mine.sum(axis=0)

    @partial(jax.jit, static_argnames="of_tokens")
    def send(self, rows: jax.Array, *, of_tokens: bool) -> jax.Array:
        """Sends rows [tokens, ..] to each of their experts, or rows of pairs [pairs, ..]; returns [bound, ..]."""
        rows = gather_rows(rows, self.order // self.choices if of_tokens else self.order)
        return gather_rows(self._travelled(rows, self.sent, self.received, self.there, self.left.shape[0]), self.arrived)

    @jax.jit
    def give_back(self, rows: jax.Array) -> jax.Array:
        """Sends the experts' rows [bound, ..] back; returns [pairs, ..], zeros for a pair without expert."""
        rows = gather_rows(rows, self.left)
        return gather_rows(self._travelled(rows, self.received, self.sent, self.back, self.order.shape[0]), self.place)

    def _travelled(self, rows: jax.Array, sent: jax.Array, received: jax.Array, places: jax.Array, room: int) -> jax.Array:
        """Sends the first sent[0] rows to rank 0, the next to rank 1, ..; returns received rows by rank, zeros up to `room`."""
        if self.axis is None:
            index = jnp.arange(room, dtype=jnp.int32)
            return gather_rows(rows, jnp.where(index < jnp.minimum(sent[0], rows.shape[0]), index, -1))
        bucket = min(self.order.shape[0], self.left.shape[0])
        padded = partial(_in_buckets, room=room, bucket=bucket, axis=self.axis)
        operands = rows, sent, received, places
        if not choice.has_gpu():
            return padded(*operands)
        return lax.platform_dependent(*operands, cuda=partial(_ragged, room=room, axis=self.axis), default=padded)


def _before(x: jax.Array, axis: int) -> jax.Array:
    return jnp.cumsum(x, axis=axis) - x


def _starts(counts: jax.Array) -> jax.Array:
    """Returns the start of each segment of [a, b], stored row by row without gaps."""
    flat = counts.reshape(-1)
    return _before(flat, axis=0).reshape(counts.shape)


def _segments(sizes: jax.Array, starts: jax.Array, room: int) -> jax.Array:
    """Returns int32 [room]: the indices of segments' elements, segment after segment; -1 after the last."""
    ends = jnp.cumsum(sizes)
    index = jnp.arange(room, dtype=jnp.int32)
    segment = jnp.minimum(jnp.searchsorted(ends, index, side="right"), sizes.shape[0] - 1)
    inside = index - (ends - sizes)[segment]
    return jnp.where(index < ends[-1], starts[segment] + inside, -1).astype(jnp.int32)


def _in_buckets(rows, sent, received, places, *, room: int, bucket: int, axis: str) -> jax.Array:
    """Sends buckets to all ranks, each large enough for any number of rows, padded with zeros."""
    place = jnp.arange(bucket, dtype=jnp.int32)[None]
    index = jnp.where(place < sent[:, None], _before(sent, axis=0)[:, None] + place, -1)
    buckets = gather_rows(rows, index.reshape(-1)).reshape(*index.shape, *rows.shape[1:])
    buckets = lax.all_to_all(buckets, axis, split_axis=0, concat_axis=0)
    ranks = jnp.arange(received.shape[0], dtype=jnp.int32)
    return gather_rows(buckets.reshape(-1, *rows.shape[1:]), _segments(received, ranks * bucket, room))


def _ragged(rows, sent, received, places, *, room: int, axis: str) -> jax.Array:
    out = explicit.vary(jnp.zeros((room, *rows.shape[1:]), rows.dtype), explicit.varying(rows) | {axis})
    return lax.ragged_all_to_all(rows, out, _before(sent, axis=0), sent, places, received, axis_name=axis)
