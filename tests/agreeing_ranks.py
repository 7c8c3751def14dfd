"""Ranks of an agreement that are played in one process."""

from __future__ import annotations

import datetime as dt

import msgspec
import torch

import layerzero as lz
from layerzero.engine.frozen_choices import Agreed
from layerzero.inspection import agreement
from layerzero.inspection.arrivals import Known, arrival, marks_of
from layerzero.inspection.board import Board

X, WEIGHT = torch.randn(4, 64), torch.ones(64)


def torch_norm(input, weight, *, eps):
    return torch.nn.functional.rms_norm(input, weight.shape, weight, eps)


def of_rank(kernel, hidden=64):
    """The class of a call, and what a rank would choose that takes this kernel for it; nothing of it is called here."""
    lz.rms_norm(torch.ones(4, hidden), torch.ones(hidden))
    found = own()
    name = next(name for name in found.choices if f"hidden={hidden} " in name)
    choice = msgspec.structs.replace(found.choices[name], kernel=kernel, version="")
    return name, msgspec.structs.replace(found, choices={name: choice}).sealed()


def own():
    return Known(anew=True).proposed()


def said_of(document):
    """What a rank says that knows these classes, and holds them if this process does."""
    held = lz.frozen()
    changed = not isinstance(held, Agreed) or held.document.hash != document.hash
    return msgspec.structs.replace(
        arrival(Known(anew=True), changed=changed), classes=marks_of(document.choices), named=document.device
    )


class Group:
    pass


def ranks(monkeypatch, *others, unable=(), **changes):
    """Let ``agree`` find other ranks that came before with these documents, and told that of themselves."""
    store, count = torch.distributed.HashStore(), len(others)
    store.set_timeout(dt.timedelta(seconds=30))
    boards = [Board(range(count + 1), rank, 30.0, store, 1, Group()) for rank in range(count + 1)]
    for rank, document in enumerate(others):
        packed = msgspec.msgpack.encode(document)
        told = msgspec.structs.replace(said_of(document), **changes)
        if told.changed and not rank:
            told = msgspec.structs.replace(told, document=packed)
        if told.versions != said_of(document).versions or changes.get("settings"):
            told = msgspec.structs.replace(told, word=1)
        chosen_ = agreement.Answer(packed)
        said = {"arrive": told, "choose": chosen_, "able": agreement.Answer(unable=dict(unable))}
        for stage, value in said.items():
            boards[rank]._told(
                torch.distributed.PrefixStore("layerzero", store), stage, msgspec.json.encode(value), None, 0.0
            )
    monkeypatch.setattr(Board, "of", staticmethod(lambda group, timeout_s: boards[-1]))
    return boards
