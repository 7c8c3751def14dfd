"""What is learnt about kernels on this machine, and kept between processes.

Four rooms, each of which imports only those before it: ``prediction`` fits and predicts times and knows no files;
``storage`` has what lies on disk and answers the engine from it; ``verification`` runs kernels in child processes;
``measurement`` times them.

What leads to what, by module:

- ``timing`` measures bursts; ``contest`` proves and times all kernels of one call with it; ``tune`` and ``bench`` hold
  contests over ``jobs``: shapes, cases, a grid, or the manifest that ``lz.record`` wrote.
- ``rehearsal`` and ``child`` run what is new here in another process first.
- ``comparison`` hands times to ``store``, which keeps them in the ``database`` (SQLite) and answers the engine.
- ``fitting`` makes of rows what ``predict`` gives for calls that were not measured; ``prior`` has the shipped times;
  ``store`` joins all of these; ``archive`` passes rows on.
- ``files`` and ``records`` keep verdicts, first-run markers and suspects in a ``folder``.
- ``vetting`` finds out by a ``child`` whether a kernel may be trusted.
- ``online`` times a share of production's calls and reports where measured times have aged.
"""
