"""Rows that several threads add, merge and forget at once."""

from __future__ import annotations

import threading
from dataclasses import replace

from journal_rows import TIME, facts, known, on_disk
from layerzero.tuning.storage import connections, database, journal, learning
from layerzero.tuning.storage.store import TimeStore


def test_what_another_thread_merges_meanwhile_is_not_remembered(folder, kernel, monkeypatch):
    store = TimeStore()
    spool, remember = store.spool, store.spool._remember

    def merged_first(rows):
        def other():
            if spool._lock.acquire(blocking=False):
                spool._merge()
                spool._drop()
                spool._lock.release()

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        remember(rows)

    monkeypatch.setattr(spool, "_remember", merged_first)
    with monkeypatch.context() as patch:
        patch.setattr(spool, "_merge_at", float("inf"))  # as while another process merges
        store.record(kernel, facts(1), TIME)
    spool._merge_at = spool._look_at = 0.0
    store.look()
    assert known(store, kernel, 1) == {1: 10.0}
    assert not store.database.has_memory()


def test_threads_lose_no_row_while_journals_are_begun_anew_and_merged(folder, kernel, monkeypatch):
    monkeypatch.setattr(journal, "MAX_OWN", 3000)
    store, failures = TimeStore(), []
    asked = {rows: facts(rows) for rows in range(1, 121)}

    def write(first):
        try:
            for rows in range(first, 121, 4):
                store.record(kernel, asked[rows], replace(TIME, median_us=float(rows)))
        except Exception as error:  # noqa: BLE001  # told below
            failures.append(error)

    threads = [threading.Thread(target=write, args=(first,)) for first in (1, 2, 3, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    store.settle()
    assert on_disk(folder) == [float(rows) for rows in range(1, 121)]
    assert not store.database.has_memory()


def test_a_row_that_would_not_be_found_again_is_not_taken_for_kept(folder, kernel, monkeypatch):
    store = TimeStore()
    store.record(kernel, facts(1), TIME)
    with monkeypatch.context() as patch:  # as where a flipped bit in another key has put the rows out of order
        in_memory = "(SELECT file FROM pragma_database_list WHERE name = 'main') = ''"
        patch.setattr(learning, "_FOUND", f"{learning._FOUND} AND {in_memory}")
        store.record(kernel, facts(2), replace(TIME, median_us=20.0))
        assert known(store, kernel, 1, 2) == {1: 10.0, 2: 20.0}
    store.settle()
    store.spool.close()
    monkeypatch.setattr(database, "RETRY_S", 0.0)
    assert known(TimeStore(), kernel, 1, 2) == {1: 10.0, 2: 20.0}


def test_journals_are_merged_anew_only_between_merges(folder, kernel, monkeypatch):
    store = TimeStore()
    store.record(kernel, facts(1), TIME)
    held = []

    def seen(_):
        try:
            with connections.turn(folder / "perfdb.sqlite", of="turn", wait_s=0.0):
                held.append(False)
        except TimeoutError:
            held.append(True)

    monkeypatch.setattr(journal, "forget_places", seen)
    store.database.aside.append(folder / "gone")
    store.look()
    assert held == [True]
