"""What ranks decide through a store: once for all, whoever is missing, late, stopped or wrong."""

from __future__ import annotations

import datetime as dt
import json
import threading
from types import SimpleNamespace

import pytest
import torch

import layerzero as lz
from layerzero.inspection import board as board_module
from layerzero.inspection.board import Board


class Group:
    """Stands for a process group: what a board keeps its connection by."""


@pytest.fixture
def boards():
    store = torch.distributed.HashStore()
    store.set_timeout(dt.timedelta(seconds=30))

    def made(ranks, *, number=1, timeout_s=30.0):
        return [Board(range(ranks), rank, timeout_s, store, number, Group()) for rank in range(ranks)]

    return made


def told_by(boards, decide, *, stage="arrive", said=b"%d"):
    """What each rank got, or the problems that it was told, from threads that run at once."""
    found = [None] * len(boards)

    def run(place, board):
        try:
            found[place] = json.loads(board.settle(stage, said % board.rank, decide))
        except lz.FrozenChoiceError as error:
            found[place] = error.problems

    threads = [threading.Thread(target=run, args=each, daemon=True) for each in enumerate(boards)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    assert not any(each.is_alive() for each in threads)
    return found


def total(said):
    return sum(map(int, said))


def test_the_last_rank_decides_for_all(boards):
    asked = []
    assert told_by(boards(4), lambda said: asked.append(1) or total(said)) == [6] * 4
    assert len(asked) == 1


def test_a_rank_that_does_not_come_is_named_and_nothing_is_decided(boards):
    made = boards(3, timeout_s=0.05)
    (one, two) = told_by([made[0], made[2]], total)
    assert one == two
    assert one[0].startswith("rank 1 did not come within 0.05 s: ended, stopped, slow, or the program does not call")


def test_a_late_rank_is_told_what_the_others_decided(boards):
    made = boards(2, timeout_s=0.05)
    early = told_by(made[:1], total)
    assert told_by(made[1:], total) == early
    assert early[0][0].startswith("rank 1 did not come")


def test_ranks_that_did_not_go_on_are_named(boards):
    made = boards(3, timeout_s=0.05)
    assert told_by(made, total) == [3, 3, 3]
    (found,) = told_by(made[:1], total, stage="able")
    assert found[0].startswith("ranks 1, 2 came and did not go on within")


def test_a_rank_that_was_stopped_decides_nothing(boards, monkeypatch):
    """It finds that all came, and the others may have ended with an error since."""
    made = boards(2)
    clock = iter([0.0, 31.0])
    made[1].leave(b"1", total)
    monkeypatch.setattr(board_module, "CLOCK", lambda: next(clock))
    assert told_by(made[:1], total) == [("rank 0 was stopped for 30 s",)]


def test_a_rank_that_ends_while_it_decides_is_named(boards):
    class EndedError(BaseException):
        """As a signal ends a process: nothing of it is caught."""

    def ending(said):
        raise EndedError

    made = boards(2, timeout_s=0.5)
    found: list[object] = []
    waiting = threading.Thread(target=lambda: found.extend(told_by(made[:1], total)), daemon=True)
    waiting.start()
    while made[0].store.add("layerzero/1/arrive/came", 0) < 1 and waiting.is_alive():
        pass
    with pytest.raises(EndedError):
        made[1].settle("arrive", b"1", ending)
    waiting.join(60)
    assert found == [("all ranks came within 0.5 s, and rank 1 ended or stopped before it decided",)]


def test_an_error_of_the_deciding_rank_is_told_to_all(boards):
    def failing(said):
        raise RuntimeError("planted")

    assert told_by(boards(2), failing) == [("deciding failed: RuntimeError: planted",)] * 2


def test_the_agreement_before_is_taken_away(boards):
    for number in (1, 2, 3):
        assert told_by(boards(2, number=number), total) == [1, 1]
    assert boards(1)[0].store.num_keys() == 5


def test_a_rank_that_was_started_again_alone_is_told_so(boards):
    made = boards(2)
    assert told_by(made, total) == [1, 1]
    (found,) = told_by(made[:1], total)
    assert found == ("rank 0 comes to agreement 1 of the group, which all had left: it was started again alone",)


def test_a_store_that_does_not_answer_is_named(boards):
    board = boards(2)[0]
    board._connected = lambda **_: (_ for _ in ()).throw(torch.distributed.DistNetworkError("gone\nmore"))
    (found,) = told_by([board], total)
    assert "rank 0: wanted the group's store, which rank 0 or torchrun's agent holds, to answer within 30 s" in found[0]
    assert found[0].endswith("(DistNetworkError: gone)")


def test_a_rank_that_the_store_answered_late_follows_what_was_decided(boards, monkeypatch):
    """Its connection broke while it waited; by another one it finds the answer that the others have."""
    made = boards(2)
    made[1].leave(b"1", total)
    monkeypatch.setattr(
        board_module.Board, "_told", lambda self, *rest: (_ for _ in ()).throw(RuntimeError("timed out"))
    )
    made[0].store.set("layerzero/1/arrive/decided", json.dumps({"answer": 7}))
    assert told_by(made[:1], total) == [7]


def test_a_group_keeps_one_connection_of_its_own_to_a_tcp_store():
    """With a new one each time torch 2.13's store stood still for seconds at every 13th."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    base = torch.distributed.PrefixStore("group", store)
    board = Board((0, 1), 0, 30.0, base, 1, Group())
    one, two, anew = board._connected(), board._connected(), board._connected(anew=True)
    assert one.underlying_store is two.underlying_store
    assert anew.underlying_store is not one.underlying_store
    one.set("here", "1")
    assert base.get("layerzero/here") == b"1"
    files = torch.distributed.HashStore()
    assert Board((0, 1), 0, 30.0, files, 1, Group())._connected().underlying_store is files


@pytest.fixture
def opened(monkeypatch):
    """Opens the next agreement of rank 0 of two, in a group that was made just now with this store."""

    def opening(store):
        group = Group()
        group.group_name, group.get_group_store = "0", lambda: store
        stand_in = SimpleNamespace(
            **dict.fromkeys(("is_available", "is_initialized"), lambda: True),
            **{name: getattr(torch.distributed, name) for name in ("GroupMember", "PrefixStore", "TCPStore")},
            group=SimpleNamespace(WORLD=group),
            get_process_group_ranks=lambda group: [0, 1],
            get_rank=lambda: 0,
        )
        monkeypatch.setattr(board_module, "distributed", stand_in)
        return Board.of(None, 3.0)

    return opening


def test_the_store_counts_agreements_so_that_groups_that_are_made_anew_begin_alike(opened):
    one, another = torch.distributed.HashStore(), torch.distributed.HashStore()
    assert [opened(store).number for store in (one, one, another, one)] == [1, 2, 1, 3]


def test_a_store_that_is_gone_when_an_agreement_begins_is_named(opened, monkeypatch):
    def gone(self, **_):
        raise torch.distributed.DistNetworkError("gone")

    monkeypatch.setattr(Board, "_connected", gone)
    with pytest.raises(lz.FrozenChoiceError, match=r"rank 0: wanted the group's store, .* to answer within 3 s"):
        opened(torch.distributed.HashStore())


def test_a_process_alone_needs_no_store():
    assert json.loads(Board.of(None, None).settle("arrive", b"3", total)) == 3
    with pytest.raises(lz.FrozenChoiceError, match="agree: deciding failed: ValueError"):
        Board.of(None, None).settle("arrive", b"no number", total)


def test_a_rank_that_is_not_in_the_group_is_told_so(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    with pytest.raises(lz.PolicyError, match="agree: wanted a rank of the group, got one outside"):
        lz.agree(torch.distributed.GroupMember.NON_GROUP_MEMBER)
    assert lz.frozen() is None


def test_a_destroyed_group_is_told_so(monkeypatch):
    with pytest.raises(
        lz.PolicyError, match=r"agree: wanted a group of torch\.distributed, got one that was destroyed"
    ):
        lz.agree("a group")  # of no initialised process
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    with pytest.raises(lz.PolicyError, match="got one that was destroyed"):
        lz.agree(torch.distributed.ProcessGroup(0, 2))
