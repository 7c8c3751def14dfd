"""What is learnt about kernels on this machine, and kept between processes.

Four rooms, each of which imports only those before it: ``predicting`` fits and predicts times and knows no files;
``keeping`` has what lies on disk and answers the engine from it; ``proving`` runs kernels in child processes;
``measuring`` times them.

What leads to what, by module:

- ``timing`` measures bursts; ``contest`` proves and times all kernels of one call with it; ``tune`` and ``bench`` hold
  contests over the ``jobs`` that ``asked`` lists: shapes, cases, a ``grid``, or the ``manifest`` that ``record`` wrote.
- ``rehearsal`` and ``child`` run what is new here in another process first; ``conditions`` says how the machine is.
- ``winner`` hands times to ``store``, which keeps them as ``rows`` in the ``database`` (SQLite) and answers the engine.
- ``learning`` and ``fitting`` make of rows what ``prediction`` gives for calls that nobody measured; ``prior`` has the
  shipped times; ``weighing`` joins all of these into evidence; ``archive`` passes rows on.
- ``files`` and ``records`` keep verdicts, first-run markers and suspects in a ``folder``; ``confirm`` clears suspects.
- ``vetting`` asks ``child`` whether a kernel may be trusted; ``vet_later`` does so in the background.
- ``online`` times a share of production's calls and tells where measured times have aged.
"""
