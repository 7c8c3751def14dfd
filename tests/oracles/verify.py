"""Verified drafts: every way through a draft, each with its chance."""

from __future__ import annotations

import numpy as np

from oracles.sampling import NEAR


def _ways(node, last, left, path, chance, row, near):
    """What is left and which nodes stood at the end of every way, with its chance; ``node`` is tried next."""
    tokens, parents, target, draft = row
    if chance == 0:
        return
    if node == len(tokens):
        yield path, left, chance
        return
    if parents[node] != last:
        yield from _ways(node + 1, last, left, path, chance, row, near)
        return
    token = tokens[node]
    share = left[token] if draft is None else left[token] / max(draft[node, token], 1e-300)
    share = 1 - near if near and abs(share - 1) <= near else min(share, 1.0)
    yield from _ways(node + 1, node, target[node + 1], [*path, node], chance * share, row, near)
    rest = left.copy()
    if draft is None:
        rest[token] = 0
    else:
        rest = np.maximum(rest - draft[node] * (1 - near), 0)
    rest = rest / rest.sum() if rest.sum() > 0 else left
    yield from _ways(node + 1, last, rest, path, chance * (1 - share), row, near)


def _chances(c, near):
    batch, count = c["draft_ids"].shape
    vocab = c["target_probs"].shape[-1]
    ids, nodes = np.zeros((batch, count + 1, vocab + 1)), np.zeros((batch, count, count + 1))
    for b in range(batch):
        parents = np.arange(-1, count - 1) if c.get("parents") is None else c["parents"][b]
        draft = None if c.get("draft_probs") is None else c["draft_probs"][b]
        length = count if c.get("draft_lens") is None else int(c["draft_lens"][b])
        row = c["draft_ids"][b, :length], parents, c["target_probs"][b], draft
        for path, left, chance in _ways(0, -1, c["target_probs"][b, 0], [], 1.0, row, near):
            for place in range(count + 1):
                if place < len(path):
                    ids[b, place, c["draft_ids"][b, path[place]] + 1] += chance
                    nodes[b, place, path[place] + 1] += chance
                    continue
                if place == len(path):
                    ids[b, place, 1:] += chance * left / left.sum()
                else:
                    ids[b, place, 0] += chance
                if place < count:
                    nodes[b, place, 0] += chance
    return ids, nodes


def _verify(c):
    sure, may = _chances(c, 0.0), _chances(c, NEAR)
    return tuple((each / each.sum(-1, keepdims=True), possible > 0) for each, possible in zip(sure, may, strict=True))


def _greedy(c):
    batch, count = c["draft_ids"].shape
    ids, nodes = np.full((batch, count + 1), -1), np.full((batch, count), -1)
    for b in range(batch):
        parents = np.arange(-1, count - 1) if c.get("parents") is None else c["parents"][b]
        length = count if c.get("draft_lens") is None else int(c["draft_lens"][b])
        last, depth = -1, 0
        while True:
            best = int(c["target_probs"][b, last + 1].argmax())
            ids[b, depth] = best
            children = [n for n in range(last + 1, length) if parents[n] == last and c["draft_ids"][b, n] == best]
            if not children:
                break
            last = nodes[b, depth] = children[0]
            depth += 1
    return ids, nodes


ORACLES = {"sampling.verify": _verify, "sampling.verify.tree": _verify, "sampling.verify.greedy": _greedy}
